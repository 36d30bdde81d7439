"""A server with configured votes, for the tests of the verifier `judge`."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SETTINGS: dict[str, Any] = {
    "method": "judge",
    "model": "judge-7b",
    "key_variable": None,
    "template": "Gold: {gold}\nAnswer: {completion}\nSay RIGHT or WRONG.",
    "right": "RIGHT",
    "wrong": "WRONG",
    "votes": 3,
    "temperature": 0.7,
    "max_tokens": 16,
    "parameters": 7.0,
    "seconds": 10.0,
    "concurrency": 4,
}


class Server(ThreadingHTTPServer):
    """A server that votes by the answer: `yes` gets three votes, `two` and `one` as many as their
    names, `none` a reply without a vote, and `hang` no reply. The first `failures` requests are
    rejected with the status 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failures = 0
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
        status = self.server.status
        if self.server.failures:
            self.server.failures -= 1
            status = 503
        answer = body["messages"][0]["content"].split("Answer: ")[1]
        if answer.startswith("hang"):
            self.rfile.read(1)  # until the client disconnects
            return
        right = next((n for word, n in VOTES.items() if answer.startswith(word)), 0)
        votes = ["it is not WRONG, it is RIGHT"] * right + ["WRONG"] * (body["n"] - right)
        if answer.startswith("none"):
            votes = ["I cannot say"] * body["n"]
        choices = [{"message": {"content": text}} for text in votes]
        reply = json.dumps({"choices": choices, "usage": {"total_tokens": 100}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "1")  # the pause before the client's next attempt
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


VOTES = {"yes": 3, "two": 2, "one": 1}


@contextmanager
def judge_server() -> Iterator[Server]:
    """Run a server."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield server
        server.shutdown()


def configured(server: Server, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the section `verify.verifiers` with the judge `j`."""
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return {"j": {**SETTINGS, "url": url, **changes}}
