"""A real browser that a test drives: headless Chromium over the DevTools protocol, on two pipes."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.fakes.patience import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = PATIENCE
"""Timeout of every operation of the browser, in seconds."""

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-default-apps --disable-extensions --disable-sync "
    "--disable-background-timer-throttling --disable-renderer-backgrounding --no-proxy-server --remote-debugging-pipe "
    "--use-fake-device-for-media-stream --use-fake-ui-for-media-stream"  # a microphone that beeps
)
# Chromium reads commands from descriptor 3 and writes to 4; asyncio cannot place descriptors, so a small program does.
_START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 63); os.dup2(w, 62); os.dup2(63, 3); os.dup2(62, 4); "
)
_START += "os.execvp(sys.argv[3], sys.argv[3:])"
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_CTRL, _SHIFT = 2, 8


class Browser:
    """``async with Browser(folder)``: a browser with an empty profile in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._targets: list[str] = []
        self.events: list[dict[str, Any]] = []

    async def __aenter__(self) -> "Browser":
        assert CHROMIUM is not None
        (down_read, down_write), (up_read, up_write) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", _START, str(down_read), str(up_write), CHROMIUM, *_FLAGS.split()]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            f"--user-data-dir={self._folder}",
            pass_fds=(down_read, up_write),
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        os.close(down_read)
        os.close(up_write)
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), os.fdopen(up_read, "rb"))
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(down_write, "wb"))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call("Browser.close")
        async with asyncio.timeout(LIMIT):
            await self._process.wait()
            await self._reading
        self._writer.close()

    async def open(self, url: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> "Tab":
        """Open a new tab with this size in CSS pixels, and return it when it has loaded ``url``."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._targets.append(target)
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = Tab(self, session)
        await tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await tab.call("Emulation.setEmulatedMedia", features=[scheme])
        await tab.call("Runtime.enable")
        await tab.call("Log.enable")
        await tab.call("Page.enable")
        await tab.call("Page.navigate", url=url)
        await tab.until("document.readyState === 'complete'")
        return tab

    async def close_tabs(self) -> None:
        """Close every tab and discard its state."""
        while self._targets:
            await self.call("Target.closeTarget", targetId=self._targets.pop())
        self.events.clear()

    async def call(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(LIMIT):
            return await answer

    async def _read(self) -> None:
        try:
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" not in message:
                    self.events.append(message)
                    continue
                answer = self._answers.pop(message["id"])
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
        except asyncio.IncompleteReadError:
            return  # the browser has ended


class Tab:
    """One page of the browser. Selectors are CSS selectors."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method for this tab and return its result."""
        return await self._browser.call(method, session=self._session, **parameters)

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, converted from JSON."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true. Fails with the page's text."""
        try:
            async with asyncio.timeout(LIMIT):
                while not await self.value(f"Boolean({expression})"):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{expression} never came; the page: {await self.text('body')}") from None

    async def text(self, selector: str) -> str:
        """Return the visible text of an element, or an empty text if there is no element."""
        return str(await self.value(f"document.querySelector({selector!r})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """Scroll an element into view and click its middle."""
        box = f"document.querySelector({selector!r})"
        await self.value(f"{box}.scrollIntoView({{block: 'nearest'}})")
        x, y = await self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def write(self, selector: str, text: str) -> None:
        """Replace the text of a field with ``text``, like typing."""
        await self.value(f"(field => {{ field.focus(); field.select(); }})(document.querySelector({selector!r}))")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, ctrl: bool = False, shift: bool = False) -> None:
        """Press a key in the element that has the focus."""
        code, text = _KEYS[key]
        modifiers = (_CTRL if ctrl else 0) | (_SHIFT if shift else 0)
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def screenshot(self, file: Path) -> None:
        """Save a picture of the visible page."""
        picture = base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        await asyncio.to_thread(file.write_bytes, picture)

    def complaints(self) -> list[str]:
        """Return the console output of the browser: uncaught exceptions, violations of the security policy, failed
        requests.
        """
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [e["params"]["exceptionDetails"]["text"] for e in mine if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in mine if e["method"] == "Log.entryAdded"]
        return thrown + [entry["text"] for entry in logged if entry["level"] in ("error", "warning")]
