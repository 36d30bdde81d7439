"""The presets on rows of their form, and the settings of a source in params.yaml."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.params import ParamsError
from tasks.common.registry import names
from tasks.grading.answers.marked import gold_boxed
from tasks.grading.loading import load as verifier
from tasks.grading.verifiers.reasoning_gym import verify
from tasks.ingest import sources as presets
from tasks.ingest.questions.identity import prompt_id
from tasks.ingest.reading import load
from tests.ingest.helpers import CHAIN_SUM, entry, found, lines, preset, sources


def test_gsm8k_reads_the_gold_after_the_mark(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "train.jsonl",
        {"question": "How many?\n", "answer": "1 + 1 = <<1+1=2>>2\nTimes 600.\n#### 1,200"},
        {"question": "How much?", "answer": "I do not know"},
        {"question": "How far?", "answer": "Far.\n#### "},
        {"question": "How long?"},
    )
    kept, rejected = found(preset("gsm8k", path))
    assert [(row.prompt, row.answer, row.verifier, row.level) for row in kept] == [
        ("How many?\n", "1200", "numeric", "2")
    ]
    assert [one.line for one in rejected] == [2, 3, 4]
    assert [one.reason for one in rejected] == ["malformed", "empty_answer", "missing_field"]


def test_empty_gold_of_math_is_never_guessed(tmp_path: Path) -> None:
    solution = r"So $x = \boxed{1}$, hence $\boxed{\frac{1}{2}}$."
    path = lines(
        tmp_path / "math.jsonl",
        {"problem": "A?", "level": "Level 3", "solution": solution},
        {"problem": "B?", "difficulty": 5.0, "answer": r"\frac{1}{3}", "solution": solution},
        {"problem": "C?", "difficulty": 2.0, "answer": None, "solution": solution},
        {"problem": "D?", "difficulty": 2.0, "answer": "", "solution": solution},
        {"problem": "E?", "level": "Level 1", "solution": "There is none."},
    )
    kept, rejected = found(preset("math", path))
    assert [(row.answer, row.level, row.verifier) for row in kept] == [
        (r"\frac{1}{2}", "3", "math"),
        (r"\frac{1}{3}", "5", "math"),
    ]
    assert [one.line for one in rejected] == [3, 4, 5]
    assert [one.reason for one in rejected] == ["empty_answer", "empty_answer", "malformed"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a}, so \fbox{\sqrt{2}}.", r"\sqrt{2}"),
        (r"\boxed{a} and \fbox{\sqrt{2}}.", r"a, \sqrt{2}"),
        (r"$x = \boxed{1}$ or $x = \boxed{2}$", "1, 2"),
        (r"\boxed{1}, so \boxed{2", None),
        (r"it is $\boxed 7$.", "7"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
    ],
)
def test_last_boxes_are_found_with_their_braces(solution: str, answer: str | None) -> None:
    assert gold_boxed(solution) == answer


def test_svamp_joins_body_and_question(tmp_path: Path) -> None:
    asked = {"Body": "Each pack costs 76.0 dollars.", "Question": "How much?"}
    rows = [{**asked, "Answer": 145.0, "Type": "Subtraction"}]
    (tmp_path / "SVAMP.json").write_text(json.dumps(rows))
    (row,), _ = found(preset("svamp", tmp_path / "SVAMP.json"))
    assert (row.prompt, row.answer) == ("Each pack costs 76.0 dollars. How much?", "145")
    assert (row.level, row.verifier) == ("Subtraction", "numeric")


def test_verl_keeps_the_messages(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"content": "1 + 1?", "role": "user"}],
            "reward_model": {"ground_truth": gold, "style": "rule"},
        }
        for gold in ("2", "")
    ]
    extra = {"data_source": "deepscaler", "extra_info": {"index": 4}}
    pl.DataFrame([{**row, **extra} for row in rows]).write_parquet(tmp_path / "a.parquet")
    (row,), (bad,) = found(preset("verl", tmp_path / "a.parquet", level="extra_info.index"))
    assert json.loads(row.messages or "") == [{"role": "user", "content": "1 + 1?"}]
    assert (row.source, row.answer) == ("verl/deepscaler", "2")
    assert (row.verifier, row.level) == ("math", "4")
    assert (bad.source, bad.line, bad.reason) == ("verl/deepscaler", 2, "empty_answer")


def test_openai_chat_takes_the_gold_from_a_field_or_from_the_last_message(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    path = lines(
        tmp_path / "a.jsonl",
        {"messages": messages},
        {"messages": messages[:1]},
        {"messages": None},
        {"messages": messages[1:]},
    )
    common: dict[str, Any] = {"name": "mine", "level": None, "verifier": "numeric"}
    (row,), rejected = found(preset("openai_chat", path, answer=None, **common))
    assert (json.loads(row.messages or ""), row.answer) == (messages[:1], "2")
    assert [one.reason for one in rejected] == ["missing_field", "missing_field", "empty_prompt"]
    path = lines(tmp_path / "b.jsonl", {"messages": messages[:1], "reference_answer": "two"})
    (row,), _ = found(preset("openai_chat", path, answer="reference_answer", **common))
    assert row.answer == "two"


def test_ifeval_keeps_instructions_and_the_arguments_that_are_set(tmp_path: Path) -> None:
    full: dict[str, Any] = {
        "key": 1000,
        "prompt": "Write without commas, and name a cat.",
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{"keywords": None}, {"keywords": ["cat"]}],
    }
    rows = [
        full,
        {**full, "kwargs": "none"},
        {key: value for key, value in full.items() if key != "kwargs"},
    ]
    (row,), rejected = found(preset("ifeval", lines(tmp_path / "a.jsonl", *rows)))
    assert json.loads(row.answer) == {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["cat"]}],
    }
    assert (row.prompt, row.verifier, row.level) == (full["prompt"], "ifeval", "2")
    assert [one.reason for one in rejected] == ["malformed", "missing_field"]
    judge = verifier("ifeval", {"ifeval": {"loose": False}})
    assert judge.verify("A cat.", row.answer).outcome == "correct"


def test_reasoning_gym_mixes_tasks_by_weight() -> None:
    tasks = [
        {**CHAIN_SUM, "weight": 3.0, "config": {"min_terms": 3, "max_terms": 3}},
        {**CHAIN_SUM, "name": "spell_backward", "level": "word_len", "verifier": "exact"},
    ]
    settings = {"seed": 5, "num_prompts": 40, "tasks": tasks}
    kept, _ = found({"preset": "reasoning_gym", "settings": settings})
    sums, spelling = (
        [row for row in kept if row.source.endswith(name)]
        for name in ("chain_sum", "spell_backward")
    )
    assert (len(sums), len(spelling)) == (30, 10)
    assert {row.level for row in sums} == {"3"}
    assert all(
        eval(row.prompt.partition(": ")[2].removesuffix(" =")) == int(row.answer) for row in sums
    )
    assert all(len(row.answer) == int(row.level) for row in spelling)


def test_gold_of_reasoning_gym_is_the_problem_without_its_place() -> None:
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {**CHAIN_SUM, "config": one_digit, "verifier": "reasoning_gym"}
    board = {**task, "name": "arc_agi", "weight": 0.02, "config": {}, "level": None}
    settings = {"seed": 5, "num_prompts": 99, "tasks": [task, board]}
    kept, _ = found({"preset": "reasoning_gym", "settings": settings})
    answers = [json.loads(row.answer)["entry"]["answer"] for row in kept]
    verdicts = [verify(own, row.answer) for own, row in zip(answers, kept, strict=True)]
    assert {verdict.outcome for verdict in verdicts} == {"correct"}
    # equal problems have equal golds
    assert len({row.prompt for row in kept}) == len({prompt_id(row) for row in kept}) < 99


def test_gsm_symbolic_uses_the_templates_in_equal_shares() -> None:
    settings = {"seed": 5, "num_prompts": 60, "templates": [6, 25, 26]}
    kept, rejected = found({"preset": "gsm_symbolic", "settings": settings})
    assert (len(kept), rejected) == (60, [])
    assert Counter(row.level for row in kept) == {"6": 20, "25": 20, "26": 20}
    assert all("units" not in row.prompt for row in kept)
    assert all(
        (row.solution or "").endswith(f"\n#### {row.answer}") for row in kept if row.level != "25"
    )
    assert None in {row.solution for row in kept}  # the solutions of template 25 are often wrong
    shorter, _ = found({"preset": "gsm_symbolic", "settings": {**settings, "num_prompts": 20}})
    assert shorter == kept[:20]
    with pytest.raises(
        ParamsError, match=r"gsm_symbolic: templates has \[32\]; reasoning_gym has 0"
    ):
        found({"preset": "gsm_symbolic", "settings": {**settings, "templates": [6, 32]}})


def test_every_preset_declares_settings_and_one_reader() -> None:
    for name in names(presets):
        module = load(name)
        assert callable(module.candidate)
        assert hasattr(module, "read") != ("path" in module.Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"preset": "gsm9k"},
            "preset is 'gsm9k'; use: apps, gsm8k, gsm_symbolic, humaneval, ifeval, mapping, math, "
            "mbpp, openai_chat, published, reasoning_gym, svamp, verl",
        ),
        ({"settings": {"pth": "x"}}, "settings.pth is unknown; allowed: path, name, prompt"),
        ({"settings": {"golds": "some"}}, "golds is 'some'; allowed: any, all"),
        ({"settings": {"options": "o", "golds": "any"}}, "has options and golds: .* is letters"),
        ({"settings": {"options": 3}}, "options is 3; give a field, or a list of fields"),
        ({"settings": {"verifier": {}}}, r"settings.verifier is .* not text"),
        ({"verifier": {"column": "a"}}, r"sources\[0\]\.verifier\.values is missing"),
        ({"verifier": 3}, "verifier must be a mapping with the keys column"),
        ({"question": {"between": ["a"]}}, r"question\.between is \['a'\]; give the text before"),
        ({"question": {"betwen": ["a", "b"]}}, r"question\.betwen is unknown; allowed: between"),
        ({"where": {"kind": []}}, r"where\.kind is \[\]; give a value or a list"),
        ({"prompt_template": "Question:"}, "must hold {prompt} once"),
        ({"system": "Be brief.", "raw": True}, "give raw, or prompt_template, or system and shots"),
        ({"presets": "jsonl"}, r"ingest.sources\[0\].presets is unknown"),
        ({"weight": 0.0}, "weight is 0.0; it must be above 0"),
        ({"max_rows": 0}, "max_rows is 0; it must be at least 1"),
        ({"split": "tset"}, "split is 'tset'; allowed: train, validation, test"),
    ],
)
def test_wrong_entry_is_named_with_the_allowed_values(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = entry(tmp_path / "a.jsonl", **change.pop("settings", {}))
    with pytest.raises(ParamsError, match=message):
        sources([{**source, **change}])


def test_generator_has_no_columns() -> None:
    settings = {"seed": 0, "num_prompts": 1, "tasks": []}
    source = {"preset": "reasoning_gym", "settings": settings, "where": {"kind": "sum"}}
    with pytest.raises(ParamsError, match="where is for files, and the preset reasoning_gym"):
        sources([source])


def test_weights_are_for_all_or_none(tmp_path: Path) -> None:
    one = entry(tmp_path / "a.jsonl")
    with pytest.raises(ParamsError, match="give every source a weight, or none"):
        sources([one, {**one, "weight": 1.0}])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sums"}, "task 'chain_sums' is unknown; .*did you mean chain_sum"),
        ({"config": {"terms": 2}}, "allowed: min_terms"),
    ],
)
def test_unknown_task_or_config_of_reasoning_gym_is_named(
    task: dict[str, Any], message: str
) -> None:
    settings = {"seed": 0, "num_prompts": 2, "tasks": [{**CHAIN_SUM, **task}]}
    with pytest.raises(ParamsError, match=message):
        found({"preset": "reasoning_gym", "settings": settings})
