"""A headless Chromium, spoken to over two pipes: it opens a page, tells what happened there, and takes orders."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium here (Debian: apt-get install chromium): the page was not opened in a browser"
PATIENCE = 60.0


def program() -> str | None:
    """Where the browser is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """``with Browser(folder) as browser``; ``folder`` is for what it must keep."""

    def __init__(self, folder: Path) -> None:
        self._number, self._events, self._buffer = 0, [], b""
        command = [
            program(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "about:blank",
        ]  # fmt: skip
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        shell = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        target = self._send("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True}, None)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        """Load a page of this size; what happened before is forgotten."""
        self._events.clear()
        self.resize(width, height, touch=touch)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", {"features": scheme})
        self._send("Page.navigate", {"url": page.resolve().as_uri()})
        self._until(lambda event: event["method"] == "Page.loadEventFired")
        self.settle()

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        """Another window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self._send("Emulation.setDeviceMetricsOverride", size)
        self._send("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    def settle(self) -> None:
        """Two pictures later."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._send("Runtime.evaluate", given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        self.settle()

    def click(self, x: float, y: float) -> None:
        """Press and let go."""
        for kind in ("mousePressed", "mouseReleased"):
            given = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", given)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        """Touch and let go."""
        self._send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
        self._send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        self.settle()

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", {"type": kind, "key": name, "code": name})
        self.settle()

    def print(self) -> bytes:
        """The page as PDF, A4."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
        return base64.b64decode(self._send("Page.printToPDF", size)["data"])

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """What is to be seen, as PNG."""
        answer = self._send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(answer["data"]))

    @property
    def requests(self) -> list[str]:
        """What the page asked for, itself included."""
        return [event["params"]["request"]["url"] for event in self._named("Network.requestWillBeSent")]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console."""
        thrown = [json.dumps(event["params"]) for event in self._named("Runtime.exceptionThrown")]
        logged = [event["params"]["entry"]["text"] for event in self._named("Log.entryAdded")]
        said = [json.dumps(event["params"]["args"]) for event in self._named("Runtime.consoleAPICalled")]
        return thrown + logged + said

    def _named(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["method"] == method]

    def _send(self, method: str, params: dict[str, Any] | None = None, session: str | None = "own") -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found, number=self._number: found.get("id") == number)
        assert "error" not in answer, answer
        return answer["result"]

    def _until(self, wanted: Any) -> dict[str, Any]:
        """The next message of that kind; events on the way are kept."""
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._next(deadline)
            if "method" in message:
                self._events.append(message)
            if wanted({"method": "", **message}):
                return message

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._in, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError("the browser says nothing more")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
