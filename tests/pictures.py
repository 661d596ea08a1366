"""The pictures of the README and the documents, made of a store that `make demo` and then the
README's sweep filled.

python -m tests.pictures STORE    # needs Textual and Chromium; writes into deployments/docs
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from quiver.flows.look.paired import pair
from quiver.flows.look.view.app import ViewApp
from quiver.stages.core.store import Store
from tests.browser import opened

COMMAND = [sys.executable, "-m", "quiver.flows.cli.main"]
DOCS = Path(__file__).parents[1] / "deployments/docs"


async def picture_of_view(store: Store) -> str:
    """SVG of the rollouts that the last policy learned from, the best first."""
    app = ViewApp(store, pair(store, "demo/policy@5", None))
    async with app.run_test(size=(118, 34)) as pilot:
        for key in ("b", *["down"] * 9):
            await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
        picture = app.export_screenshot(title="quiver view demo/policy@5")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # no font from elsewhere


async def picture_of(page: str, picture: Path, width: int, height: int, keys: str = "") -> None:
    """PNG of a web page, by Chromium, after keys were pressed."""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(page, Path(folder) / "profile", width, height) as tab:
            await asyncio.sleep(10)
            await tab.ask(
                "Runtime.evaluate", expression="document.querySelector('textarea')?.focus()"
            )
            for key in keys:
                await tab.press(key)
                await asyncio.sleep(2)
            (await tab.still_picture()).save(picture, optimize=True)


def main() -> None:
    """Write them."""
    path = sys.argv[1]
    (DOCS / "view.svg").write_text(asyncio.run(picture_of_view(Store(path))))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        subprocess.run([*COMMAND, "report", "demo", "-o", report, "--store", path], check=True)
        asyncio.run(picture_of(report.as_uri(), DOCS / "report.png", 1000, 900))
        asyncio.run(picture_of(f"{report.as_uri()}#sweeps", DOCS / "sweep.png", 1240, 380))
    view = [*COMMAND, "view", "demo/policy@5", "--web", "--json", "--store", path]
    with subprocess.Popen(view, stdout=subprocess.PIPE, text=True) as serving:
        url = json.loads(serving.stdout.readline())["url"]
        asyncio.run(picture_of(url, DOCS / "web.png", 1100, 640, keys="b"))
        serving.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
