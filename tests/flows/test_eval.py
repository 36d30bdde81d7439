"""The options of `winnow eval`, and wrong options of others."""

import argparse
from pathlib import Path

import pytest

from flows.__main__ import parser_of
from flows.cli import eval as word
from tasks.common import params
from tasks.harness.records import Subject
from tests.parameters import every_value

VALUES = every_value()


def options(*arguments: str) -> argparse.Namespace:
    return parser_of("eval").parse_args(["eval", *arguments])


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        (("sgpo",), [Subject("sgpo", VALUES["experiment"]["seeds"][0])]),
        (("sgpo", "--seed", "7", "--baseline"), [Subject(), Subject("sgpo", 7)]),
        (("--baseline",), [Subject()]),
    ],
)
def test_policies_of_the_options(arguments: tuple[str, ...], cells: list[Subject]) -> None:
    assert word.cells_of(options(*arguments, "--tasks", "gsm8k"), VALUES, Subject) == cells


def test_missing_policy_is_refused() -> None:
    with pytest.raises(params.ParamsError, match="set RECIPE, or --baseline"):
        word.cells_of(options("--tasks", "gsm8k"), VALUES, Subject)


def test_tasks_are_a_list_with_commas() -> None:
    parsed = options("grpo", "--tasks", "gsm8k, hellaswag,", "--limit", "8")
    assert parsed.tasks == ["gsm8k", "hellaswag"]
    assert (parsed.limit, parsed.few_shot, parsed.chat_template) == (8, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval grpo --tasks ,", "--tasks: no task: use gsm8k"),
        ("eval grpo --tasks gsm8k --limit 0", "--limit: 0 is below 1"),
        ("eval grpo --tasks gsm8k --few-shot -1", "--few-shot: -1 is below 0"),
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
        ("eval grpo --tasks sums --include-path mine", "include", "{}/mine"),
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
