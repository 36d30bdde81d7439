"""Remote sources: a web server and a substitute for the hub on loopback, and a real S3 server."""

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from tasks.common.files import ArtifactError
from tasks.common.locations import open_location
from tasks.common.params import ParamsError
from tasks.ingest.files.fetching import check_address, local_file
from tests.ingest.helpers import entry, found
from tests.patience import PATIENCE

ROWS = b'{"question": "2 + 2?", "gold": "4"}\n{"question": "3 + 3?", "gold": "6"}\n'
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Web(http.server.BaseHTTPRequestHandler):
    """A web server whose replies depend on the path. Under /cut/ it truncates as many replies as
    the number in the path. It closes connections after a reply, under /moved/silently/ silently."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "moved":
            return self.reply(
                302,
                b"",
                Location="/rows.jsonl" if parts[-1] == "here" else "http://example.invalid/rows",
            )
        if parts[0] == "busy" or (
            parts[0] == "cut" and self.asked.count(self.path) <= int(parts[1])
        ):
            return self.reply(503, b"") if parts[0] == "busy" else self.reply(200, ROWS, cut=20)
        if parts[0] == "datasets":  # the path of a file of the hub
            return self.reply(200, ROWS, ETag='"abc"', **{"X-Repo-Commit": COMMIT})
        if parts[-1] == "rows.jsonl.gz":
            return self.reply(200, gzip.compress(ROWS))
        return self.reply(200, ROWS) if parts[-1] == "rows.jsonl" else self.reply(404, b"")

    def reply(self, status: int, body: bytes, cut: int = 0, **headers: str) -> None:
        self.send_response(status)
        if "silently" not in self.path:
            headers["Connection"] = "close"
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:-cut] if cut else body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    Web.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "path",
    [
        "rows.jsonl",
        "rows.jsonl.gz",
        "moved/here",
        "moved/silently/here",
        "cut/2/rows.jsonl",
        "rows.jsonl?key=secret",
    ],
)
def test_file_of_a_web_server_is_read(web: str, path: str, tmp_path: Path) -> None:
    kept, rejected = found(entry(f"{web}/{path}"))
    assert ([row.answer for row in kept], rejected) == (["4", "6"], [])


def test_fetched_file_is_removed_and_local_file_is_used_in_place(web: str, tmp_path: Path) -> None:
    with local_file(f"{web}/rows.jsonl", tmp_path) as path:
        assert tmp_path in path.parents
        assert path.read_bytes() == ROWS
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    with local_file(str(tmp_path / "a.jsonl"), tmp_path) as path:
        assert path == tmp_path / "a.jsonl"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("{web}/nowhere?key=secret", r"/nowhere: the server responded with 404"),
        ("{web}/busy/x", r"the server responded with 503"),
        ("{web}/cut/9/rows.jsonl", r"cannot be fetched \(RemoteProtocolError, 4 attempts\)"),
        ("{web}/moved/away", r"leads to http://example.invalid: only https:// is read"),
        ("http://example.invalid/a.jsonl", "only https:// is read"),
        ("https://me:secret@example.invalid/a.jsonl", "contains credentials"),
        (
            "https://127.0.0.1:1/a@1.0/b.jsonl?key=secret@x",
            r"https://127.0.0.1:1/a@1.0/b.jsonl cannot be fetched \(ConnectError",
        ),
        ("https://127.0.0.1:x/a.jsonl", r"127.0.0.1:x/a.jsonl cannot be fetched \(InvalidURL"),
        ("hf://org/name", "is not a file of the hub: hf://datasets/ORG/NAME@REVISION/PATH"),
        ("hf://datasets/org/name/rows.jsonl", "cache, and the hub cannot be reached: connect"),
        ("ftp://example.invalid/a.jsonl", "is not a location"),
        ("/nowhere/a.jsonl", r"/nowhere/a.jsonl: No such file"),
    ],
)
def test_error_names_the_location_without_its_secrets(
    web: str, location: str, message: str
) -> None:
    with pytest.raises((ArtifactError, ParamsError), match=message) as caught:
        found(entry(location.format(web=web)))
    assert "secret" not in str(caught.value)


def test_redirect_to_an_address_with_credentials_is_refused() -> None:
    with pytest.raises(ArtifactError, match="must not contain credentials"):
        check_address("https://me:secret@example.invalid/a.jsonl", "https://host/a.jsonl")


def test_cached_file_of_the_hub_needs_no_connection(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process fetches it: the library reads the hub's address when it is imported."""
    location = f"hf://datasets/org/name@{COMMIT}/data/rows.jsonl"
    code = (
        "import sys; from tasks.ingest.files.fetching import local_file\n"
        "with local_file(sys.argv[1], None) as path: print(path.read_text())"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "HF_ENDPOINT": web,
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", code, location]
    text = subprocess.check_output(command, env={**clean, **settings}, timeout=PATIENCE)
    assert text.rstrip() == ROWS.rstrip()
    assert any(
        f"/datasets/org/name/resolve/{COMMIT}/data/rows.jsonl" in asked for asked in Web.asked
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with local_file(location, None) as path:
        assert path.read_bytes() == ROWS


@pytest.mark.s3
def test_object_of_a_bucket_is_read(bucket: str) -> None:
    files, path = open_location(bucket)
    files.pipe_file(
        f"{path}/a.json.gz",
        gzip.compress(json.dumps([json.loads(line) for line in ROWS.splitlines()]).encode()),
    )
    location: Any = f"{bucket}/a.json.gz"
    assert [row.answer for row in found(entry(location))[0]] == ["4", "6"]
    with pytest.raises(ArtifactError, match="no such bucket or file"):
        found(entry(f"{bucket}/b.json.gz"))
