"""Policies on tasks of lm-evaluation-harness: records, tables and resumption. With the package, on
sums of the embedded policy; without it, all other code."""

import importlib.util
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.harness import records, run
from tasks.harness.records import Subject
from tasks.models.folder import policy_digest
from tasks.models.policy import load_tokenizer
from tests.files import plant
from tests.parameters import every_value

ROOT = Path(__file__).resolve().parents[2]
VALUES = every_value()
with_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason=f"lm_eval is not installed ({run.INSTALL})"
)
TRAINED = Subject("grpo", 0)
ANSWERS = {"exact_match,last": 0.75, "exact_match_stderr,last": 0.25, "acc,none": np.float32(0.5)}
RESULTS = {"alias": "sums", "sample_len": 4, "acc_stderr,none": "N/A", **ANSWERS}
RESULTS |= {"perplexity,none": math.inf, "solved,none": True}
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: generate_until
doc_to_text: "{text}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 48}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the embedded policy as the initial one and as that of `grpo` with seed 0."""
    layout = Layout(tmp_path / "data")
    trained = layout.train("grpo", 0)
    shutil.copytree(ROOT / "data" / "policy", layout.policy)
    shutil.copy(ROOT / "data" / "policy.json", layout.policy_card)
    shutil.copytree(layout.policy, trained / "policy")
    describe(layout)
    (trained / "curve.parquet").write_bytes(b"first")
    policy = read_checked(layout.policy_card)["digest"]
    for folder, found in ((layout.baseline, 0.45), (layout.evaluation("grpo", 0), 0.651)):
        write_checked(folder / "metrics.json", {"pass_at_1": found, "policy": policy})
    return layout


def describe(layout: Layout) -> None:
    """Write the digest beside the policy, as training does."""
    trained = layout.train("grpo", 0) / "policy"
    write_checked(layout.trained_card("grpo", 0), {"digest": policy_digest(trained)})


def options(*tasks: str, **changes: Any) -> run.Asked:
    nothing: dict[str, Any] = dict.fromkeys(run.Asked.__dataclass_fields__)
    return run.Asked(**{**nothing, "tasks": list(tasks), "trust_tasks": True, **changes})


def record(layout: Layout, cell: Subject, task: str, **changes: Any) -> Path:
    """Write one record."""
    measured = run.measured(task, {"results": {task: RESULTS}, "n-samples": {}})
    path = records.path_of(layout, cell, task, changes)
    policy = read_checked(cell.card(layout))["digest"]
    where = {"recipe": cell.recipe, "seed": cell.seed, "task": task, "policy": policy}
    write_checked(path, {**measured, **where, "num_samples": 1319, **changes})
    return path


def test_a_group_has_its_own_metrics_and_those_of_its_tasks() -> None:
    results = {
        "results": {
            "easy": {"acc,none": 1.0},
            "hard": {"acc,none": 0.0},
            "both": {"alias": "both"},
        },
        "groups": {"both": {"acc,none": 0.5}},
        "n-samples": {
            "easy": {"original": 40, "effective": 3},
            "hard": {"original": 40, "effective": 2},
        },
        "versions": {"both": 1.0},
    }
    found = {"task": "both", **run.measured("both", results)}
    assert (found["num_samples"], found["task_version"]) == (5, 1.0)
    assert [(task, one["value"]) for task, _, one in records.shown(found)] == [("both", 0.5)]
    del results["groups"]
    found = {"task": "both", **run.measured("both", results)}
    assert [(task, one["value"]) for task, _, one in records.shown(found)] == [
        ("easy", 1.0),
        ("hard", 0.0),
    ]


def test_the_table_has_pass_at_1_and_the_benchmarks(layout: Layout) -> None:
    assert records.table(layout) == ""
    path = record(layout, TRAINED, "sums")
    record(layout, Subject(), "sums")
    assert records.table(layout).splitlines() == [
        "policy   pass@1  benchmark  metric             value  stderr  samples",
        "initial   45.0%  sums       acc               0.5000            1,319",
        "initial   45.0%  sums       exact_match/last  0.7500  0.2500    1,319",
        "grpo/0    65.1%  sums       acc               0.5000            1,319",
        "grpo/0    65.1%  sums       exact_match/last  0.7500  0.2500    1,319",
    ]
    (layout.train("grpo", 0) / "curve.parquet").write_bytes(b"second")  # of the same policy
    assert records.table(layout).count("grpo/0") == 2
    write_checked(TRAINED.card(layout), {"digest": "3f2a"})  # another policy
    assert "grpo/0" not in records.table(layout)
    assert path.exists()
    record(layout, TRAINED, "sums", limit=8)
    assert records.table(layout).count("grpo/0") == 2
    assert "65.1%" not in records.table(layout)  # that was the former policy


def test_the_error_without_the_harness_names_the_command(layout: Layout, monkeypatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match=r"lm_eval is not installed; .*\.\[eval\]"):
        next(run.measure(layout, VALUES, [TRAINED], options("gsm8k")))


def test_a_policy_that_was_not_trained_is_named(layout: Layout) -> None:
    with pytest.raises(
        ArtifactError,
        match=r"sgpo/1 has no .*policy: create it with `winnow run`",
    ):
        run.open_cell(layout, Subject("sgpo", 1))


TASK_OF_AN_INDEX = SimpleNamespace(
    kind=SimpleNamespace(name="TASK"), yaml_path=None, cfg=None, tags=frozenset()
)
MANAGER = SimpleNamespace(task_index=dict.fromkeys(("one", "two"), TASK_OF_AN_INDEX))


def test_the_options_of_vllm_reach_the_harness(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that change samples are a part of the record's name, too."""
    registry = SimpleNamespace(
        get_model=lambda _: SimpleNamespace(create_from_arg_obj=lambda a, b: a | b)
    )
    monkeypatch.setattr(run, "import_module", lambda _: registry)
    engine = {**VALUES["engine"], "name": "vllm", "vllm": {"max_model_len": 64, "seed_all": 1}}
    index = run.Index(MANAGER, None, None)
    for backend, passed, named in (
        ("vllm", {"max_model_len": 64, "seed_all": 1}, {"seed_all": 1}),
        ("hf", {}, None),
    ):
        asked = options("one", backend=backend)
        harness = run.Harness(layout, {"engine": engine}, TRAINED, asked, index)
        assert passed.items() <= harness.loaded().items()
        assert ("max_model_len" in harness.loaded()) == bool(passed)
        assert harness.settings("one").get("vllm") == named


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch) -> list[str]:
    """Replace the parts of the harness that are not installed; record each requested task. The GPU
    must be locked meanwhile."""
    evaluated: list[str] = []

    def evaluate(self: run.Harness, task: str) -> dict[str, Any]:
        assert (tmp_path / "gpu-a").read_text() == f"{os.getpid()}\n"
        evaluated.append(f"{self.cell.name} {task}")
        return {"results": {task: RESULTS}, "n-samples": {task: {"effective": 4}}}

    monkeypatch.setenv("WINNOW_LOCKS", str(tmp_path))
    monkeypatch.setattr(run, "first_gpus", lambda _, num: ["a"][:num])
    monkeypatch.setattr(run.Harness, "evaluate", evaluate)
    monkeypatch.setattr(run, "open_index", lambda *_: run.Index(MANAGER, None, None))
    monkeypatch.setattr(run, "versions", lambda _: {"lm_eval": "0"})
    return evaluated


def test_tasks_before_an_interrupt_are_not_measured_again(
    layout: Layout, evaluated: list[str]
) -> None:
    cells, wanted = [Subject(), TRAINED], options("one", "two")
    begun = run.measure(layout, VALUES, cells, wanted)
    for _ in range(3):
        next(begun)
    begun.close()
    assert evaluated == ["initial one", "initial two", "grpo/0 one"]
    assert len(list(run.measure(layout, VALUES, cells, wanted))) == 4
    assert evaluated[3:] == ["grpo/0 two"]
    list(run.measure(layout, VALUES, cells, wanted))
    assert len(evaluated) == 4


def test_another_policy_or_other_options_are_measured_again(
    layout: Layout, evaluated: list[str]
) -> None:
    for changes in ({}, {"limit": 2}, {"few_shot": 3}, {"max_tokens": 9}, {"limit": 2}):
        list(run.measure(layout, VALUES, [TRAINED], options("one", **changes)))
    assert len(evaluated) == 4
    with (layout.train("grpo", 0) / "policy" / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ArtifactError, match="is not what training wrote"):
        list(run.measure(layout, VALUES, [TRAINED], options("one")))
    describe(layout)
    list(run.measure(layout, VALUES, [TRAINED], options("one")))
    assert len(evaluated) == 5


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return task files on a table of 16 sums, one of them with a template that calls Python."""
    folder = tmp_path_factory.mktemp("tasks")
    prompt = "State the final answer to the following arithmetic problem: {} + 4 ="
    sums = [{"question": prompt.format(n), "answer": str(n + 4)} for n in range(1, 17)]
    reach = f"{{{{ cycler.__init__.__globals__.os.mkdir('{folder}/reached') }}}}"
    return plant(
        folder,
        {
            "sums.jsonl": "".join(json.dumps(row) + "\n" for row in sums),
            "sums.yaml": TASK.format(name="sums", folder=folder, text="{{question}}"),
            "reach.yaml": TASK.format(name="reach", folder=folder, text=reach),
        },
    )


def share_solved(folder: Path, table: Path) -> float:
    """Return the share of a table's questions that a policy solves greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    solved = []
    for line in table.read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer(row["question"], return_tensors="pt").input_ids
        written = model.generate(ids, do_sample=False, max_new_tokens=48)[0, ids.shape[1] :]
        text = tokenizer.decode(written, skip_special_tokens=True)
        solved.append(re.findall(r"-?[0-9]+", text)[-1:] == [row["answer"]])
    return sum(solved) / len(solved)


@with_harness
@pytest.mark.slow
def test_the_embedded_policy_on_a_custom_task(
    layout: Layout, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = importlib.import_module("lm_eval.utils")
    monkeypatch.setattr(utils, "env", utils.env)  # restored after the test
    both = [Subject(), TRAINED]
    found = list(run.measure(layout, VALUES, both, options("sums", include=tasks)))
    values = [one["metrics"]["exact_match/last"]["value"] for _, _, one in found]
    assert values == [share_solved(layout.policy, tasks / "sums.jsonl")] * 2  # the same policy
    assert 0 < values[0] < 1
    assert found[0][2]["num_samples"] == 16
    assert found[0][2]["task_version"] == 1.0
    assert len(records.table(layout).splitlines()) == 3
    files = {path: path.read_bytes() for _, path, _ in found}
    list(run.measure(layout, VALUES, both, options("sums", include=tasks)))
    assert {path: path.read_bytes() for path in files} == files
    with pytest.raises(ArtifactError, match="reach: SecurityError: access to attribute"):
        list(run.measure(layout, VALUES, [TRAINED], options("reach", include=tasks)))
    assert not (tasks / "reached").exists()
    (tasks / "sums.jsonl").write_text('{"question": \n')
    with pytest.raises(ArtifactError, match="^sums: .*JSON parse error: Invalid"):
        list(run.measure(layout, VALUES, [TRAINED], options("sums", include=tasks)))
    with pytest.raises(ArtifactError, match="can run code .* --trust-tasks"):
        run.open_index(["sums"], tasks, trust_tasks=False)


@with_harness
@pytest.mark.slow
def test_names_are_checked_before_anything_is_loaded(tasks: Path, tmp_path: Path) -> None:
    """A user's file may replace a task of a group of the harness, and then determines it, too."""
    own = TASK.format(name="arabic_exams", folder=tasks, text="{{question}}")
    folder = str(plant(tmp_path, {"exams.yaml": own}))
    index = run.open_index(["gsm8k"], folder, trust_tasks=True)
    for name, message in (
        ("gsm8", "there is no task 'gsm8' in the harness; did you mean gsm8k?"),
        ("humaneval", "humaneval runs programs that the policy writes"),
        ("humaneval_infilling", r"infilling \(of humaneval_infilling\) runs programs"),
    ):
        with pytest.raises(ArtifactError, match=message):
            index.names(["gsm8k", name])
    assert index.names(["gsm8k", "mmlu", "gsm8k"]) == ["gsm8k", "mmlu"]
    assert "gsm8k" in index.names(["math_word_problems"])  # a tag names the tasks with it
    found = [index.source(name) for name in ("gsm8k", "arabic_leaderboard_arabic_exams")]
    assert found == [None, index.fingerprint]
