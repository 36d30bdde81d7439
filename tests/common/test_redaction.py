"""Secrets in addresses are neither shown nor recorded."""

from pathlib import Path

import pytest
import yaml

from flows.__main__ import parser_of
from flows.cli import init, run
from flows.pipeline import commands, flow, roots, summary
from flows.pipeline.request import FlowRequest
from flows.serve import server
from tasks.code.effective import complete
from tasks.common import params
from tasks.common.config.changes import show
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.common.redaction import has_credentials, without_secrets
from tasks.common.tracking import Tracking
from tasks.common.tracking.journal import Journal, Tracker
from tests.flows.doctor.test_check import changed, found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://name:hidden@host:80/a.jsonl", "https://host:80/a.jsonl"),
        ("https://name:p@hidden@host/a", "https://host/a"),
        ("https://token@host/a?X-Amz-Signature=hidden", "https://host/a"),
        ("HTTPS://host?key=hidden", "HTTPS://host"),
        ('["s3://bucket/a", "http://u:hidden@h/v1"]', '["s3://bucket/a", "http://h/v1"]'),
        ("postgresql+psycopg://u:hidden@h/db failed", "postgresql+psycopg://h/db failed"),
        ("sqlite:////a/b@c/mlflow.db", "sqlite:////a/b@c/mlflow.db"),
        ("is 1 + 1 = 2? ask a@b.c", "is 1 + 1 = 2? ask a@b.c"),
        ("hf://org/name@revision", "hf://org/name@revision"),
        ("--set a=s3://KEY:hid/den+@bucket/x: no", "--set a=s3://bucket/x: no"),
        ("s3://arn:aws:s3:::point/a@b", "s3://arn:aws:s3:::point/a@b"),
        ("http://host:80/a@1?key=hidden: 404; hf://o/a@R?", "http://host:80/a@1: 404; hf://o/a@R?"),
    ],
)
def test_addresses_are_reduced_to_scheme_host_and_path(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_credentials_are_before_the_host() -> None:
    assert has_credentials("https://token@host/x")
    assert not has_credentials("sqlite:////a/b@c/mlflow.db")


SECRET = "s3://KEY:hid/den@bucket/x"
JUDGE = {"method": "judge", "url": "http://u:hidden@host/v1"}
OWN = {"from": "grpo", "train": {"reference": {"source": SECRET}}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store.location", SECRET),
        ("policy.source", "hf://user:hidden@org/name@revision"),
        ("policy.source", "https://hidden@host/model"),
        ("train.reference", {"source": SECRET}),
        ("recipes", {"unused": OWN}),
        ("ingest.sources.0.settings.path", SECRET),
        ("ingest.sources.0.settings.path", "hf://hidden@datasets/a/b/c.jsonl"),
        ("tracking.uri", "https://name:hidden@host"),
        ("engine.urls", ["http://host/v1", "https://name:hidden@host/v1"]),
        ("verify.verifiers", {"j": JUDGE}),
        ("engine.cluster", {"ray": "ray://name:hidden@host:1"}),
    ],
)
def test_credentials_in_any_address_are_refused_by_key_before_anything_is_written(
    tmp_path: Path, key: str, value: object
) -> None:
    values = changed(**{key.replace(".", "__"): value})
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    readers = [lambda: params.load(tmp_path / "params.yaml"), lambda: complete(values)]
    for read in readers[:1] if key == "recipes" else readers:  # only the file has unused recipes
        with pytest.raises(ParamsError, match=f"{key}.* contains credentials") as raised:
            read()
        assert "hid" not in str(raised.value)


@pytest.mark.parametrize(
    "section",
    [
        {"store": {"location": "gs://bucket?k=hidden"}},
        {"policy": {"source": "https://host/x?k=hidden"}},
        {"train": {"reference": {"source": "s3://host/x?k=hidden"}}},
        {"engine": {"urls": ["name:hidden@host"]}},
        {"engine": {"urls": "https://host/v1?k=hidden"}},
        {"tracking": {"uri": "https://host/?k=hidden"}},
    ],
)
def test_other_addresses_are_refused_by_their_settings_without_their_query(section: dict) -> None:
    (name,) = section
    with pytest.raises(ParamsError, match=name) as raised:
        complete({**changed(), name: section[name]})
    assert "hidden" not in str(raised.value)


def test_messages_and_values_are_shown_without_secrets() -> None:
    signed = "https://host/a?X-Amz-Signature=hidden"
    assert str(ArtifactError(f"{signed}: away")) == "https://host/a: away"
    assert show(signed) == '"https://host/a"'


@pytest.mark.parametrize(
    "command",
    [
        ["store", "stat", "--location", SECRET],
        ["push", "grpo", SECRET],
        ["push", "a.jsonl", "https://name:hidden@host"],
    ],
)
def test_credentials_on_a_command_line_are_not_repeated(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser_of(command[0]).parse_args(command)
    assert "contains credentials" in (error := capsys.readouterr().err)
    assert "hid" not in error


def test_init_and_a_new_root_refuse_credentials_before_they_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(init, "FILE", tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("policy: {source: tiny}\n")
    given = ["init", "--max-tokens", "8", "--data", "embedded", "--model"]
    with pytest.raises(ParamsError, match="--model contains credentials"):
        init.run(parser_of("init").parse_args([*given, "hf://u:hidden@org/name@r"]))
    assert "hidden" not in (tmp_path / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(f"store: {{location: '{SECRET}'}}\n")
    with pytest.raises(ParamsError, match="store.location contains credentials"):
        roots.prepare(roots.Root("other"))
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]


def test_prefect_records_overrides_without_the_query_of_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[dict] = []
    monkeypatch.setattr(server, "provide", lambda: None)
    monkeypatch.setattr(flow, "flow_over", lambda _: lambda **values: recorded.append(values))
    request = FlowRequest(overrides=["a.path=https://host/a?sig=hidden", "train.lr=1"])
    assert run.run_flow(None, request) == ""
    assert recorded[0]["overrides"] == ["a.path=https://host/a", "train.lr=1"]


def test_record_contains_no_secret_of_an_address(tmp_path: Path) -> None:
    events: list[dict] = []
    journal = Journal("uri", {"name": "x", "record": "1"}, tmp_path, lambda: events.append)
    tracker = Tracker(journal)
    source = {"path": "https://u:hidden@host/a.jsonl?signature=hidden"}
    tracker.params({"ingest": {"sources": [{"settings": source}]}, "url": "https://h/?k=hidden"})
    tracker.tags({"error": "ArtifactError: https://u:hidden@host/v1 does not answer"})
    tracker.experiment({"ingest": {"sources": [{"settings": source}]}}, {}, "")
    assert len(events) == 3
    assert "hidden" not in str(events)
    assert "https://host/a.jsonl" in str(events)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("https://name:hidden@host", "MLFLOW_TRACKING_USERNAME"),
        ("https://host/?token=hidden", "MLFLOW_TRACKING_TOKEN"),
        ("name:hidden@host", "tracking.uri must be null"),
    ],
)
def test_credentials_in_tracking_uri_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ParamsError, match=message) as raised:
        Tracking(uri, "winnow", 0.0, [])
    assert "hidden" not in str(raised.value)


def test_address_of_prefect_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://name:hidden@host:4200/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert summary.prefect_place() == "http://host:4200"
    assert "http://host:4200/api" in server.away(url)
    assert "hidden" not in server.away(url)


def test_doctor_refuses_credentials_without_showing_them(tmp_path: Path) -> None:
    values = changed(tracking__uri="https://name:hidden@host")
    assert "tracking.uri contains credentials" in str(found(tmp_path, values))
    assert "hidden" not in str(found(tmp_path, values))
