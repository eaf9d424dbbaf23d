"""A headless Chromium, driven over a pipe with its DevTools protocol: no library needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """The browser's path, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser; use as a context manager."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_commands, self._out = os.pipe()
        self._in, write_answers = os.pipe()

        def wire() -> None:  # the browser reads commands from 3 and answers on 4
            os.dup2(read_commands, 13)
            os.dup2(write_answers, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.getTargets")["targetInfos"][0]["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, timeout: float = 120, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come between are kept in ``events``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + timeout
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Viewport and colour scheme."""
        metrics = {"deviceScaleFactor": 1, "mobile": width < 640}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: str, file: Path, height: int) -> None:
        """Load a page by way of a file, wait until it says that it is ready, and forget what was
        before."""
        file.write_text(page)
        self.events.clear()
        self.size(1280, height)
        self.call("Page.navigate", url=f"file://{file}")
        self.run(
            """new Promise((done, failed) => {
              const look = () => window.sipipe ? window.sipipe.ready.then(() => done(1), failed)
                                               : setTimeout(look, 20);
              look();
            })"""
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited, errors raised."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames later everything that was asked for is drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))")

    def screenshot(self, file: Path) -> None:
        """A picture of the page, PNG."""
        self.settle()
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, fromSurface=True
        )
        file.write_bytes(base64.b64decode(answer["data"]))

    def problems(self) -> list[str]:
        """Errors that the page logged, and addresses that it asked the network for."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(
                    str(params["exceptionDetails"].get("exception", {}).get("description"))
                )
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            if event.get("method") == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:")):
                    found.append(url)
        return found
