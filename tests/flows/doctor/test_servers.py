"""Findings of the doctor on the servers in the parameters."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.flows.doctor.test_check import changed, errors, found


class Models(BaseHTTPRequestHandler):
    """A model server whose path determines its answer; `keyed` requires a key."""

    def do_GET(self) -> None:
        answers = {"empty": (200, '{"data": []}'), "page": (200, "<html>"), "gone": (404, "{}")}
        answers |= {"loading": (503, "{}"), "moved": (302, "")}
        name = self.path.split("/")[1]
        status, text = answers.get(name, (200, '{"data": [{"id": "policy"}]}'))
        if name == "keyed" and self.headers["Authorization"] != "Bearer secret":
            status = 401
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/good/models")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("good", None),
        ("keyed", None),
        ("empty", "/empty/models lists no model"),
        ("page", "/page/models does not answer in JSON"),
        ("gone", "/gone/models responded with 404"),
        ("moved", "/moved/models responded with 302"),
        ("loading", "/loading/models responded with 503: {}: start the server"),
    ],
)
def test_answers_of_model_servers(
    tmp_path: Path, server: str, name: str, message: str | None
) -> None:
    found = errors(tmp_path, engine__name="server", engine__urls=[f"{server}/{name}"])
    assert [message in line for line in found if message] == [True] * (message is not None)
    assert bool(found) == (message is not None)


def test_the_error_of_a_refused_key_does_not_contain_it(
    tmp_path: Path, server: str, monkeypatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    (message,) = errors(tmp_path, engine__urls=[f"{server}/keyed"])
    assert "responded with 401" in message
    assert "OPENAI_API_KEY" in message
    assert "other" not in message


def test_a_silent_model_server_is_an_error_only_if_all_are_silent(
    tmp_path: Path, server: str
) -> None:
    silent = "http://127.0.0.1:1"
    alone = found(tmp_path, changed(engine__urls=[silent]))
    assert "is not reachable (ClientConnectorError): start the server" in alone.errors[0]
    both = found(tmp_path, changed(engine__urls=[silent, f"{server}/good"]))
    assert both.errors == []
    assert "engine.urls: http://127.0.0.1:1/v1 is not reachable" in both.remarks[0]
    assert "is refused with servers of others" in both.remarks[1]


def test_updates_in_flight_need_servers(tmp_path: Path) -> None:
    found = errors(tmp_path, train__in_flight_updates=True, train__max_staleness=1)
    assert found[0].startswith("recipe grpo: train.in_flight_updates needs the engine server")


def test_a_silent_tracking_server_is_a_remark(tmp_path: Path) -> None:
    silent = found(tmp_path, changed(tracking__uri="http://127.0.0.1:1"))
    assert silent.errors == []
    assert "does not respond" in silent.remarks[0]
