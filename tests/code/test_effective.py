"""The effective settings of every cell: which values change them, and which do not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from dvc.stage.cache import _get_cache_hash

from tasks.code.__main__ import with_digest, write
from tasks.code.effective import SECTIONS, complete, of_cells
from tasks.code.origins import leaves, recipe_rows, rows
from tasks.code.schema import schema
from tasks.common import params, recipes
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


SAMPLED = {"profile", "baseline", "grpo/evaluate", "grpo/train"}
GRADED = {*SAMPLED, "ingest"}
CELL = {"grpo/allocate", "grpo/train"}
READERS: dict[str, set[str]] = {
    "experiment.recipes": {
        "report",
        *(f"sgpo/{name}" for name in ("allocate", "train", "evaluate")),
    },
    "experiment.seeds": {"report"},
    "experiment.budget": {"report", "grpo/allocate"},
    "ingest": {"ingest"},
    "policy": {"policy"},
    "policy.supervised": {"policy", "ingest"},
    "policy.trust_remote_code": set(),  # of an external policy alone
    "sampling": {*SAMPLED, "grpo/allocate"},
    "engine": set(),
    "engine.name": {"grpo/train"},
    "engine.dtype": {"grpo/train"},
    "engine.vllm": {*SAMPLED, "grpo/allocate"},
    "verify": set(),
    **dict.fromkeys(("verify.seconds", "verify.memory_gb", "verify.verifiers"), GRADED),
    "profile": {"profile"},
    "gates": {"grpo/allocate"},
    "allocate": {"grpo/allocate"},
    "train": {"grpo/train"},
    **dict.fromkeys(
        ("train.updates", "train.correction", "train.prompt_gradient", "train.warm_start"), CELL
    ),
    **dict.fromkeys(
        (f"train.{slot}.method" for slot in ("control", "generate", "advantage", "loss")), CELL
    ),
    **dict.fromkeys(("train.select", "train.replay", "train.loss.entropy"), CELL),
    **dict.fromkeys(("train.kl_coefficient", "train.reference"), CELL),
    "evaluate": {"baseline", "grpo/evaluate"},
    "report": {"report"},
    **{key: set[str]() for key in ("store", "learner", "guards", "checkpoint", "tracking")},
}
"""The cells of the recipe grpo whose results the values under a key can change. The longest key
that a value's name starts with counts."""

VALUES: dict[str, Any] = {
    "experiment.recipes": ["grpo", "sgpo"],
    "experiment.seeds": [0, 1],
    "experiment.budget.account": "charged",
    "policy.source": "hf://org/name@main",
    "policy.tiny.training.device": "cuda",
    "policy.supervised": {"sources": [{"preset": "gsm8k", "settings": {"path": "a.jsonl"}}]},
    "engine.name": "server",
    "engine.device": "cpu",
    "engine.dtype": "bfloat16",
    "engine.weight_transfer": "nccl",
    "engine.urls": ["http://127.0.0.1:8000"],
    "store.location": "elsewhere",
    "verify.verifiers": {"mine": {"method": "math"}},
    "train.batch.unit": "prompts",
    "train.betas": [0.8, 0.95],
    "train.dtype": "bfloat16",
    "train.lora": {"rank": 4, "alpha": 8.0, "modules": ["all-linear"], "base_bits": 32},
    "train.warm_start": {"data": "profile", "steps": 2},
    "train.advantage_over": "pool",
    "train.divisor": "kept",
    "train.correction.ratio_to": "sampler",
    "train.correction.level": "sequence",
    "train.correction.mode": "mask",
    "train.correction.reject": {"level": "sequence", "low": 0.5, "high": 2.0},
    "train.shape": [{"method": "length"}],
    "train.select.method": "mixed",
    "train.control.method": "dapo",
    "train.advantage.method": "rloo",
    "train.advantage.scale": "batch",
    "train.external.python": "python3",
    "train.external.arguments": {"top_p": 1.0},
    "train.external.command": ["program"],
    "train.external.target": "verl",
    "train.external.checkpoint": "final",
    "train.external.rollouts": {"format": "verl"},
    "train.loss.ratio": "sequence",
    "train.loss.normalize": "sequence",
    "tracking.uri": "sqlite:///other.db",
    "tracking.experiment": "other",
    "tracking.also": ["tensorboard"],
}
"""Another value of those settings for which the kind of the value does not suggest one."""

ELSEWHERE = {
    "sampling.top_p": "training refuses others",
    "sampling.top_k": "training refuses others",
    "engine.vllm": "needs vLLM as the engine",
    "train.batch.counts": "needs a slot that keeps a fixed number",
    "train.optimizer_bits": "needs torchao",
    "train.branches": "needs train.decay_share",
    "train.correction.proximal": "needs train.max_staleness",
    "engine.cluster": "needs a cluster",
    "profile.stop": "refused with recipes that read whole groups of the profile",
    "train.reference.source": "needs a folder with a policy",
    "train.in_flight_updates": "needs a server and several other settings",
    "train.over_provision": "needs a server and several other settings",
    "train.reference.reset_every": "needs a KL term",
    "train.generate.method": "others need settings of their own",
    "train.replay.method": "others need settings of their own",
    "train.loss.method": "others have other keys",
    "learner.shard": "needs several processes",
    "learner.replicas": "needs several processes",
    "train.trainer": "others have settings of their own",
}
"""Leaves that cannot be changed alone, and why."""


def others(value: Any) -> list[Any]:
    """Return values of the same kind, of which one is usually valid."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 0.5, value + 0.25] if isinstance(value, float) else [value + 1, value - 1]
    return [0.5, 2] if value is None else [[*value, *value[-1:]]] if isinstance(value, list) else []


def with_value(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    key, _, rest = name.partition(".")
    inner = with_value(values.get(key) or {}, rest, value) if rest else value
    return {**values, key: inner}


def accepted(values: dict[str, Any], name: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield all values of the experiment with other values of one leaf, where they are valid."""
    for other in [VALUES[name]] if name in VALUES else others(value):
        with suppress(ParamsError):
            if other != value:
                yield complete(with_value(values, name, other))


def keys_of(whole: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the settings of every cell, and the key that DVC's run cache has for them."""
    cells = {name: with_digest(name, chosen) for name, chosen in of_cells(whole).items()}
    key = _get_cache_hash
    return {name: (each, key({"params": {"f": each}}, key=True)) for name, each in cells.items()}


def test_every_value_repeats_exactly_the_cells_that_it_can_change() -> None:
    values = {**WRITTEN, "experiment": {**WRITTEN["experiment"], "recipes": ["grpo"]}}
    whole = complete(values)
    before, unchanged, wrong = keys_of(whole), set(), {}
    for name, value in leaves({key: whole[key] for key in SECTIONS}, ""):
        found = next(accepted(values, name, value), None)
        if found is None:
            unchanged.add(name)
            continue
        after = keys_of(found)
        missing = ({}, "")
        moved, rerun = (
            {cell for cell, both in after.items() if both[i] != before.get(cell, missing)[i]}
            for i in (0, 1)
        )
        of = max((key for key in READERS if f"{name}.".startswith(f"{key}.")), key=len)
        if not moved == rerun == READERS[of]:
            wrong[name] = (moved, rerun)
    assert wrong == {}
    assert unchanged == {*ELSEWHERE}


def test_the_copy_of_the_parameters_has_the_same_settings(tmp_path: Path) -> None:
    own = {"mine": {"from": "winnow", "train": {"learning_rate": 1e-5}}, "grpo": {"train": {}}}
    experiment = {**WRITTEN["experiment"], "recipes": ["grpo", "mine"]}
    values = {**WRITTEN, "experiment": experiment, "recipes": own}
    write(values, ROOT, tmp_path)
    copy = params.load(tmp_path / "params.yaml")
    assert complete(copy) == complete(values)
    assert recipes.FOLDER.joinpath("winnow.yaml").exists()  # but the copy does not read it
    assert [set(recipe) for recipe in copy["recipes"].values()] == [{"allocate", "train"}] * 2


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
