"""Wrong options, and paths in options."""

from pathlib import Path

import pytest

from flows.__main__ import parser_of


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --price=nan", "invalid money value: 'nan'"),
        ("plan --price=-1", "invalid money value: '-1'"),
        ("plan --price=inf", "invalid money value: 'inf'"),
        (
            "serve --cron nonsense",
            "winnow serve: error: argument --cron: 'nonsense' is not a cron expression: it must "
            "have five fields, such as '0 3 * * *'\n",
        ),
    ],
)
def test_wrong_options_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser_of(words.split()[0]).parse_args(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "place"),
    [
        ("push sgpo out", "destination", "{}/out"),
        ("push a.jsonl sqlite:///b.db", "destination", "sqlite:///{}/b.db"),
        ("push sgpo s3://bucket/out", "destination", "s3://bucket/out"),
        ("store stat --location there", "location", "{}/there"),
    ],
)
def test_paths_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parser_of(words.split()[0]).parse_args(words.split())
    assert getattr(parsed, name) == place.format(tmp_path)
