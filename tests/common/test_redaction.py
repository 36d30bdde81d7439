"""Secrets in addresses are neither shown nor recorded."""

from pathlib import Path

import pytest

from flows.pipeline import summary
from flows.serve import server
from tasks.common.params import ParamsError
from tasks.common.redaction import has_credentials, without_secrets
from tasks.common.tracking import Tracking
from tasks.common.tracking.journal import Journal, Tracker
from tests.doctor.test_check import changed, found


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
    ],
)
def test_addresses_are_reduced_to_scheme_host_and_path(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_credentials_are_before_the_host() -> None:
    assert has_credentials("https://token@host/x")
    assert not has_credentials("sqlite:////a/b@c/mlflow.db")


def test_record_contains_no_secret_of_an_address(tmp_path: Path) -> None:
    events: list[dict] = []
    journal = Journal("uri", {"name": "x", "record": "1"}, tmp_path, lambda: events.append)
    tracker = Tracker(journal)
    source = {"path": "https://u:hidden@host/a.jsonl?signature=hidden"}
    tracker.params({"ingest": {"sources": [{"settings": source}]}, "url": "https://h/?k=hidden"})
    tracker.tags({"error": "ArtifactError: https://u:hidden@host/v1 does not answer"})
    tracker.experiment({"ingest": {"sources": [{"settings": source}]}}, {})
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
