"""A real browser for tests, driven over the W3C WebDriver protocol; nothing to install but the browser."""

import base64
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
KEYS = {"right": "\ue014", "left": "\ue012", "down": "\ue015", "end": "\ue010", "page down": "\ue00f"}


class Browser:
    def __init__(self, port: int, profile: Path, width: int, height: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        arguments = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        options: dict[str, Any] = {"binary": CHROMIUM, "args": arguments}
        self.phone = width < 500
        if self.phone:  # a window cannot be this narrow, but an emulated phone can
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{answer['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def open(self, path: Path) -> None:
        self.call("POST", "/url", {"url": path.as_uri()})

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def wait_for(self, script: str, pattern: str) -> None:
        """Wait until a script's result matches: pointer moves take effect with the next frame."""
        for _ in range(50):
            if re.search(pattern, seen := self.run(script)):
                return
            time.sleep(0.1)
        raise AssertionError(f"{pattern!r} is not in {seen!r}")

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": KEYS[k]} for k in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a point in an element (tap it on a phone), in shares of its width and height."""
        script = f"""const e = document.querySelector({selector!r}); e.scrollIntoView({{block: "center"}});
            const r = e.getBoundingClientRect(); return [r.left + {x} * r.width, r.top + {y} * r.height];"""
        left, top = (round(v) for v in self.run(script))
        move = {"type": "pointerMove", "duration": 0, "x": left, "y": top}
        tap = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        kind, actions = ("touch", [move, *tap]) if self.phone else ("mouse", [move])
        pointer = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": actions}
        self.call("POST", "/actions", {"actions": [pointer]})

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextmanager
def browser(profile: Path, width: int, height: int) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        opened = Browser(port, profile, width, height)
        try:
            yield opened
        finally:
            opened.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()
