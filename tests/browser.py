"""Chromium as a test drives it, by its DevTools protocol.

    async with opened("http://127.0.0.1:8000", folder) as tab:
        await tab.ask("Runtime.evaluate", expression="document.title")

https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []
        """Events that the browser sent."""

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                return message["result"]
            self.events.append(message)

    async def press(self, key: str) -> None:
        """Type one character."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" else {}
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def picture(self) -> Image.Image:
        """Take a screenshot."""
        content = await self.ask("Page.captureScreenshot")
        return Image.open(io.BytesIO(base64.b64decode(content["data"]))).convert("RGB")

    async def still_picture(self, other_than: Image.Image | None = None) -> Image.Image:
        """Take a screenshot once the page stays the same for half a second and differs from
        `other_than`."""
        last = await self.picture()
        while True:
            await asyncio.sleep(0.5)
            now = await self.picture()
            is_other = other_than is None or now.tobytes() != other_than.tobytes()
            if is_other and now.tobytes() == last.tobytes():
                return now
            last = now


def num_colours(picture: Image.Image) -> int:
    """Count the colours of a picture."""
    return len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0))


@asynccontextmanager
async def opened(
    url: str, folder: Path, width: int = 1000, height: int = 700
) -> AsyncIterator[Tab]:
    """Open a page in a browser whose profile is the new `folder`."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}"]
    browser = await asyncio.create_subprocess_exec(
        "chromium", *options, "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port = folder / "DevToolsActivePort"
        while not (port.exists() and port.read_text().count("\n")):
            assert browser.returncode is None
            await asyncio.sleep(0.1)
        root = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            pages = await (await session.get(f"{root}/json")).json()
            (page,) = [each for each in pages if each["type"] == "page"]
            address = page["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Network", "Runtime"):
                    await tab.ask(f"{domain}.enable")
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await tab.ask("Emulation.setDeviceMetricsOverride", **size)
                await tab.ask("Emulation.setScrollbarsHidden", hidden=True)
                await tab.ask("Page.navigate", url=url)
                yield tab
    finally:
        browser.terminate()
        await browser.wait()
