"""The two pictures of the README, made of a store that `make demo` filled.

python -m tests.pictures STORE    # needs Textual and Chromium; writes into deployments/docs
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from quiver.flows.look.paired import pair
from quiver.flows.look.view.app import ViewApp
from quiver.stages.core.store import Store

DOCS = Path(__file__).parents[1] / "deployments/docs"


async def picture_of_view(store: Store) -> str:
    """SVG of the rollouts that the last policy learned from, the best first."""
    app = ViewApp(store, pair(store, "demo/policy@latest", None))
    async with app.run_test(size=(118, 34)) as pilot:
        for key in ("b", *["down"] * 9):
            await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
        picture = app.export_screenshot(title="quiver view demo/policy@latest")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # no font from elsewhere


def take_picture(page: str, picture: Path, width: int, height: int) -> None:
    """PNG of a web page, by Chromium."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
    subprocess.run(["chromium", *options, f"--screenshot={picture}", page], check=True)


def main() -> None:
    """Write both."""
    path = sys.argv[1]
    (DOCS / "view.svg").write_text(asyncio.run(picture_of_view(Store(path))))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        command = [
            sys.executable,
            "-m",
            "quiver.flows.cli.main",
            "report",
            "demo",
            "-o",
            str(report),
        ]
        subprocess.run([*command, "--store", path], check=True)
        take_picture(report.as_uri(), DOCS / "report.png", 1000, 900)


if __name__ == "__main__":
    main()
