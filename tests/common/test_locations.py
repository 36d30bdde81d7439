"""Buckets on a real server: errors have messages, waits are bounded, and partial writes are never
read."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tasks.common import locations
from tasks.common.files import ArtifactError
from tasks.common.locations import SIGNERS, open_file, open_location, quiet_loggers, reaching
from tasks.common.processes.ports import free_port
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

BODY = bytes(range(256)) * 2**17  # 32 MiB: more than the kernel buffers for a stopped server


def write(location: str, body: bytes) -> None:
    files, path = open_location(location)
    with reaching(location):
        files.pipe_file(path, body)


def read(location: str) -> bytes:
    with open_file(location) as file:
        return file.read()


def names(location: str) -> list[str]:
    files, path = open_location(location)
    with reaching(location):
        return [name.rpartition("/")[2] for name in files.find(path)]


def failure(action: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ArtifactError) as raised:
        action(*arguments)
    message = str(raised.value)
    assert SECRET_KEY not in message
    assert ACCESS_KEY not in message
    return message


def test_folder_is_a_location(tmp_path: Path) -> None:
    files, path = open_location(str(tmp_path / "a"))
    assert (files.protocol, path) == (("file", "local"), str(tmp_path / "a"))
    assert failure(read, str(tmp_path / "a")) == f"{tmp_path}/a: No such file or directory"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("gs://bucket/x", "gs:// is not a location: use a folder or s3://bucket/prefix"),
        ("s3://", "'s3://' has no bucket"),
        (
            "s3://name:hidden@bucket/x",
            "a location (s3://) must not contain credentials: set AWS_ACCESS_KEY_ID",
        ),
        ("s3://name:+/hidden@bucket/x", "a location (s3://) must not contain credentials"),
    ],
)
def test_invalid_location_is_refused(location: str, message: str) -> None:
    refusal = failure(open_location, location)
    assert message in refusal
    assert "hidden" not in refusal


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "http://name:hidden@127.0.0.1:9000"])
def test_invalid_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    message = failure(open_location, "s3://bucket/x")
    assert "AWS_ENDPOINT_URL must be http://host:port or https://host" in message
    assert "hidden" not in message


@pytest.mark.parametrize("number", ["many", "0", "-1", "2.5", ""])
def test_invalid_number_of_attempts_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", number)
    message = failure(open_location, "s3://bucket/x")
    assert f"AWS_MAX_ATTEMPTS is {number!r}: it must be a whole number above 0" in message


def test_fault_of_this_machine_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as raised, reaching("s3://bucket/x"):
        (tmp_path / "no-such-folder" / "y").write_text("")
    assert (
        str(raised.value)
        == f"s3://bucket/x: {tmp_path}/no-such-folder/y: No such file or directory"
    )
    with (
        pytest.raises(ArtifactError) as raised,
        reaching("s3://bucket/x"),
        Path("/dev/full").open("w") as full,
    ):
        full.write("x")
    assert "s3://bucket/x: OSError (No space left on device)" in str(raised.value)


@pytest.mark.s3
def test_refusals_of_the_server_are_explained(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(f"{bucket}/x", b"1")
    assert read(f"{bucket}/x") == b"1"
    assert "there is no such bucket or file" in failure(read, f"{bucket}/y")
    assert "there is no such bucket or file (NoSuchBucket)" in failure(
        write, "s3://not-there/x", b"1"
    )
    for name, code in (
        ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"),
    ):
        monkeypatch.setenv(name, "wrong")
        S3FileSystem.clear_instance_cache()
        message = f"{bucket}: access denied ({code}): check the credentials"
        assert message in failure(names, bucket)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    S3FileSystem.clear_instance_cache()
    assert (
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        in failure(names, bucket)
    )


@pytest.mark.s3
def test_signed_requests_are_not_logged(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-for-this-session")
    S3FileSystem.clear_instance_cache()
    files, path = open_location(f"{bucket}/x")
    files.pipe_file(path, b"1")
    assert "a-token-for-this-session" not in caplog.text
    assert ACCESS_KEY not in caplog.text
    for name in SIGNERS:  # without the protection
        logging.getLogger(name).setLevel(logging.DEBUG)
    files.pipe_file(path, b"1")
    quiet_loggers()
    assert "a-token-for-this-session" in caplog.text
    assert ACCESS_KEY in caplog.text


def use_server(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    S3FileSystem.clear_instance_cache()


def test_endpoint_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(monkeypatch, free_port())
    error = failure(write, "s3://bucket/x", b"1")
    assert (
        "the server does not respond (EndpointConnectionError; endpoint: http://127.0.0.1:" in error
    )
    assert "run the same command again when it is back" in error


@pytest.mark.s3
def test_silent_server(bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(locations, "READ_SECONDS", 1)
        impatient.setenv("AWS_MAX_ATTEMPTS", "2")
        S3FileSystem.clear_instance_cache()
        s3.hold_gateway()
        try:
            message = failure(names, bucket)
        finally:
            s3.release_gateway()
    assert "the server does not respond (ReadTimeoutError; endpoint:" in message
    S3FileSystem.clear_instance_cache()
    assert names(bucket) == []


def cut_during(s3: S3Server, action: Callable[[], Any], *, away: bool = False) -> "Future[Any]":
    """Start `action` with a stopped server, kill the server, and restart it: at once, or with
    `away` only after the action has ended. Return the action's future."""
    s3.hold_gateway()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        time.sleep(0.3)  # connected, and all buffers are full
        assert not future.done()
        s3.kill_gateway()
        try:
            if away:
                future.exception()
        finally:
            s3.start_gateway()
    return future


@pytest.mark.s3
def test_write_and_read_continue_after_a_restart_of_the_server(bucket: str, s3: S3Server) -> None:
    cut_during(s3, lambda: write(f"{bucket}/x", BODY)).result()
    assert cut_during(s3, lambda: read(f"{bucket}/x")).result() == BODY


@pytest.mark.s3
def test_interrupted_write_creates_no_object(
    bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    write(f"{bucket}/old", b"before")
    S3FileSystem.clear_instance_cache()
    for name in ("new", "old"):
        future = cut_during(s3, lambda name=name: write(f"{bucket}/{name}", BODY), away=True)
        assert "the server does not respond" in failure(future.result)
    assert names(bucket) == ["old"]
    assert (
        read(f"{bucket}/old") == b"before"
    )  # an object is replaced only when the new one is complete
    write(f"{bucket}/old", BODY)
    assert read(f"{bucket}/old") == BODY


class Cutting(BaseHTTPRequestHandler):
    """A server whose one file has a mebibyte, and which ends every answer after a half of it."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 20))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(bytes(1 << 19))


def test_truncated_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Cutting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use_server(monkeypatch, server.server_port)
        assert "the server does not respond" in failure(read, "s3://bucket/x")
        files, path = open_location("s3://bucket/x")
        with pytest.raises(ArtifactError, match="not respond"), reaching("s3://bucket/x"):
            files.cat_file(path)
        server.shutdown()
