"""The effective settings of every cell: which values change them, and which do not."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tasks.code.effective import complete, of_cells
from tasks.code.origins import recipe_rows, rows
from tasks.code.schema import schema
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.params import ParamsError
from tasks.train.methods.loss import clip

WRITTEN = params.load(ROOT / "params.yaml")
RECIPES = ("grpo", "sgpo", "winnow")


def changed(**sections: Any) -> set[str]:
    """Return the cells whose settings differ with other values of these sections."""
    experiment = {"recipes": [*RECIPES], "seeds": [0]}
    values = {**WRITTEN, "experiment": experiment}
    other = {name: {**(values.get(name) or {}), **keys} for name, keys in sections.items()}
    before, after = (of_cells(complete(each)) for each in (values, {**values, **other}))
    return {name for name in after if before.get(name) != after[name]}


def of(stage: str) -> set[str]:
    return {f"{name}/{stage}" for name in RECIPES}


@pytest.mark.parametrize(
    ("sections", "cells"),
    [
        ({"profile": {"num_samples": 9}}, {"profile"}),
        ({"train": {"learning_rate": 1e-5}}, of("train")),
        ({"train": {"select": {"method": "mixed"}}}, of("train") | of("allocate")),
        ({"train": {"control": {"method": "dapo"}}}, {f"{n}/{s}" for n in ("grpo", "sgpo")
                                                      for s in ("train", "allocate")}),
        ({"train": {"loss": {"method": "clip", "clip_low": 0.1}}}, of("train")),
        ({"train": {"updates": {"epochs": 2}}}, of("train") | of("allocate")),
        ({"policy": {"trust_remote_code": True}}, set()),
        ({"sampling": {"seed": 1}}, {"profile", "baseline"} | of("allocate") | of("train")
         | of("evaluate")),
        ({"evaluate": {"num_samples": 16}}, {"baseline"} | of("evaluate")),
        ({"recipes": {"sgpo": {"allocate": {"strategy": "uniform", "group_size": 2}}}},
         {"sgpo/allocate"}),
        ({"engine": {"max_rows": 3}, "learner": {"share_prompts": False}}, set()),
        ({"engine": {"name": "server", "vllm": {"block_size": 16}}}, of("train")),
        ({"engine": {"name": "server", "vllm": {"quantization": "fp8"}}},
         {"profile", "baseline"} | of("allocate") | of("train") | of("evaluate")),
        ({"guards": {"max_nonfinite_steps": 9}, "store": {"batch_rollouts": 3}}, set()),
        ({"verify": {"processes": 7}, "checkpoint": {"keep": 9}}, set()),
        ({"tracking": {"experiment": "other"}}, set()),
    ],
)  # fmt: skip
def test_a_value_changes_the_cells_that_it_can_change(
    sections: dict[str, Any], cells: set[str]
) -> None:
    assert changed(**sections) == cells


def test_an_external_policy_does_not_depend_on_the_tiny_policy() -> None:
    policy = {"source": "hf://org/name@main"}
    assert of_cells(complete({**WRITTEN, "policy": policy}))["policy"] == {
        "policy": {**policy, "trust_remote_code": False}
    }


def test_neither_the_stage_nor_settings_nor_methods_import_slow_libraries(tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, sys\n"
        "import tasks.code.origins, tasks.code.schema, tasks.train.methods as methods\n"
        "from tasks.code.__main__ import main; assert main() == 0\n"
        "for found in pkgutil.walk_packages(methods.__path__, 'tasks.train.methods.'):\n"
        "    importlib.import_module(found.name)\n"
        "slow = {'torch', 'transformers', 'mlflow', 'prefect', 'dvc'}\n"
        "print(*sorted(slow & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_the_origin_of_every_value() -> None:
    found = {name: (value, origin) for name, value, origin in rows(WRITTEN)}
    assert found["sampling.max_tokens"] == (64, "params.yaml")
    assert found["sampling.top_p"] == (1.0, "default")
    values = {**WRITTEN, "train": {**WRITTEN["train"], "loss": {"method": "vcpo", "base": 0.5}}}
    own = {"mine": {"from": "winnow", "train": {"loss": {"method": "clip", "clip_low": 0.1}}}}
    found = {name: each for name, *each in recipe_rows({**values, "recipes": own}, "mine")}
    assert found["allocate.group_size"] == [2, "recipe mine"]
    assert found["train.loss.clip_low"] == [0.1, "recipe mine"]
    assert found["train.loss.clip_high"] == [0.28, "default"]
    assert found["train.learning_rate"] == [3e-4, "params.yaml"]
    assert found["train.control.prior.strength"] == [8.0, "default"]


def test_a_mistake_that_recipes_share_is_one_problem() -> None:
    with pytest.raises(ParamsError) as raised:
        complete({**WRITTEN, "sampling": {"temperature": 0.0}})
    [message] = raised.value.problems
    assert message.startswith("recipe grpo, sgpo, winnow: training needs sampling.temp")


def test_a_slot_without_a_method_changes_the_default_method() -> None:
    own = {"mine": {"from": "grpo", "train": {"loss": {"clip_high": 0.4}}}}
    experiment = {"recipes": ["grpo", "mine"], "seeds": [0]}
    changed = {"loss": {"clip_low": 0.1}, "select": {}}
    whole = complete({**WRITTEN, "experiment": experiment, "train": changed, "recipes": own})
    cells = of_cells(whole)
    default = {"method": "clip", **asdict(clip.Settings())}
    for recipe, clip_high in (("grpo", 0.28), ("mine", 0.4)):
        loss = {**default, "clip_low": 0.1, "clip_high": clip_high}
        assert cells[f"{recipe}/train"]["train"]["loss"] == loss
        assert cells[f"{recipe}/train"]["train"]["select"] == {"method": "all"}
    with pytest.raises(ParamsError, match="train.loss.clip_lo is unknown; .* mean clip_low"):
        complete({**WRITTEN, "train": {"loss": {"clip_lo": 0.1}}})


def test_the_schema_for_editors_is_current() -> None:
    assert json.loads((ROOT / "docs" / "params.schema.json").read_text()) == schema(), (
        "run: winnow params --schema > docs/params.schema.json"
    )


def test_every_field_has_a_description() -> None:
    def undescribed(part: Any, where: str) -> list[str]:
        inner = (part.get("properties") or {}).items() if isinstance(part, dict) else ()
        own = [where] if where and not part.get("description") else []
        is_slot = isinstance(part, dict) and "method" in (part.get("properties") or {})
        more = [] if is_slot else [n for key, p in inner for n in undescribed(p, f"{where}.{key}")]
        return own + more

    found = schema()["properties"]
    assert [
        n for key, part in found.items() if key != "recipes" for n in undescribed(part, key)
    ] == []


def test_the_projects_file_is_short() -> None:
    lines = (ROOT / "params.yaml").read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines[1:])) <= 115


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("train", {"learning_rate": -1e-4}, "train.learning_rate is -0.0001; it must be at least"),
        ("train", {"max_steps": 0}, "train.max_steps is 0; it must be at least 1"),
        ("train", {"betas": [0.9]}, r"train.betas is \[0.9\]; they are AdamW's two"),
        ("train", {"betas": [0.9, 1.0]}, "from 0 on and below 1"),
        ("train", {"correction": {"cap": 0.0}}, "train.correction.cap is 0.0; it must be above 0"),
        ("learner", {"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0; it must"),
        ("verify", {"seconds": 0.0}, "verify.seconds is 0.0; it must be above 0"),
        ("evaluate", {"pass_at": [0, 1]}, "evaluate.pass_at is 0; it must be at least 1"),
        ("report", {"num_bootstrap": 0}, "report.num_bootstrap is 0; it must be at least 1"),
        ("sampling", {"top_k": -1}, "sampling.top_k is -1; it must be at least 0"),
        ("sampling", {"top_p": 1.5}, "sampling.top_p is 1.5; it must be from 0 to 1"),
        ("allocate", {"seed": -1}, "allocate.seed is -1; it must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(section: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        complete({**WRITTEN, section: keys})


def test_a_folder_that_cannot_be_written_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("")
    command = [sys.executable, "-m", "tasks.code", "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{tmp_path}/code/")
    assert "is a file, not a folder" in line
