"""A headless Chromium that opens one page, driven by its own protocol (Chrome DevTools)."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.patience import PATIENCE, wait_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str | None:
    """Return why no page can be opened, or None."""
    return None if EXECUTABLE else "no Chromium (Debian's package chromium)"


class Browser:
    """A Chromium with one tab. `problems` are errors of the page and the browser; `requests` are
    the addresses that the page requested."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [
                str(EXECUTABLE),
                "--headless=new",
                "--no-sandbox",  # root has no sandbox; only this one file is opened
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-port=0",  # a free port on the loopback address
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        self.number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        port, path = self.address(folder / "DevToolsActivePort")
        self.socket = connect(
            f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=PATIENCE, proxy=None
        )
        self.session = ""
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def address(self, path: Path) -> tuple[str, str]:
        """Wait for the port and the path of the protocol."""
        wait_for(lambda: path.exists() and len(path.read_text().split()) == 2, self.process)
        port, address = path.read_text().split()
        return port, address

    def close(self) -> None:
        """End the browser."""
        self.call("Browser.close")
        self.socket.close()
        self.process.wait(PATIENCE)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and record the events before its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        session = {"sessionId": self.session} if getattr(self, "session", "") else {}
        self.socket.send(json.dumps(message | session))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer.get("method"), answer.get("params", {}))

    def note(self, event: str | None, params: dict[str, Any]) -> None:
        """Record errors and requests of an event."""
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        if event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"])[:500])
        if event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"])[:500])
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"][:200])

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; await a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {json.dumps(found['exceptionDetails'])[:800]}")
        return found["result"].get("value")

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        """Set the size of the screen; with `touch`, of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    def scheme(self, name: str) -> None:
        """Prefer `dark` or `light`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> None:
        """Open a file, and wait until its scripts have run."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        loaded = "location.protocol === 'file:' && document.readyState === 'complete'"
        wait_for(lambda: self.run(loaded))
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that changes are on the screen."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str, text: str = "") -> None:
        """Press a key, as a keyboard does."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **extra)
        self.settle()

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)
        self.settle()
