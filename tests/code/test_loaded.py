"""The digest of every stage covers all files that the stage loads, except neutral ones.

A wrong digest would give a stale result silently, so the stages run here, on a tiny world, and
record the files that they and their children load (`hook/sitecustomize.py`)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.code.cells import cells
from tasks.code.left_out import is_left_out
from tasks.common.code import ROOT, module_file
from tasks.common.registry import declared
from tests.code.hook.sitecustomize import run_recorded
from tests.parameters import every_value
from tests.stages import FORKS, give_record
from tests.train.worlds import PARAMS, make_world

RECIPE = {
    "allocate": {"strategy": "uniform", "group_size": 4},
    "train": {"select": {"method": "pods", "keep": 2}},
}
STAGES = {
    "ingest": ("ingest", "other"),
    "policy": ("policy", "made"),
    "profile": ("profile", "data"),
    "baseline": ("evaluate", "data"),
    "r/allocate": ("allocate", "data", "--recipe", "r", "--seed", "0"),
    "r/train": ("train", "data", "--recipe", "r", "--seed", "0"),
    "r/evaluate": ("evaluate", "data", "--recipe", "r", "--seed", "0"),
    "report": ("report", "data"),
}
"""The stage, data root and coordinates of every cell."""

POLICY = {
    "tasks/common/": "reads parameters, writes files, draws the bar",
    "tasks/engines/": "the locks of GPUs",
    "tasks/grading/": "settings within those of training",
    "tasks/train/": "the interval of checkpoints",
    "tasks/ingest/__init__.py": "empty",
    "tasks/ingest/settings.py": "settings within policy.supervised",
    "tasks/models/": "saves, loads and describes a policy, for any weights",
    "tasks/__init__.py": "empty",
    "tasks/policy/__main__.py": "the command line",
    "tasks/policy/run.py": "made here or fetched, then recorded",
    "tasks/policy/embedded/": "the result of that code, with its digests",
    "tasks/policy/card.py": "the description of a policy",
    "tasks/policy/source.py": "fetches external policies; counts for those",
    "tasks/policy/converted.py": "converts GGUF files; counts for those",
}
"""For the stage `policy` alone, with its result in git: only code that makes the weights counts."""


RECORDED = {
    "r/train": {
        "tasks/train/methods/select/pods.py",  # loaded by name
        "tasks/grading/verifiers/numeric.py",  # in a separate process
    },
    "report": {"tasks/report/views/page.html"},  # not Python
    "policy": {"tasks/policy/families/chain_sum.py"},
}
"""Files that must be among those that are loaded."""

OWN = ("train", "recipes")  # sections that `values` writes itself


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    real = every_value()
    source = real["ingest"]["sources"][0]
    training = {**real["policy"]["tiny"]["training"], "tokens": 2.0e4}
    return {
        **real,
        **{name: {**real[name], **PARAMS[name]} for name in PARAMS if name not in OWN},
        "experiment": {"recipes": ["r"], "seeds": [0]},
        "ingest": {
            **real["ingest"],
            "splits": {"train": 32, "validation": 8, "test": 8},
            "sources": [{**source, "settings": {**source["settings"], "num_prompts": 128}}],
        },
        "policy": {**real["policy"], "tiny": {**real["policy"]["tiny"], "training": training}},
        "profile": {"num_samples": 2},
        "train": {**real["train"], "max_steps": 2, "validation": PARAMS["train"]["validation"]},
        "recipes": {"r": RECIPE},
    }


@pytest.fixture(scope="module")
def loaded(
    values: dict[str, Any], guesser: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str]]:
    """Run the stage of every cell once, and return the project's files that it loaded."""
    root = tmp_path_factory.mktemp("world")
    make_world(root / "data", guesser, [4] * 12)
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    found = {}
    for number, (cell, (stage, data, *coordinates)) in enumerate(STAGES.items()):
        give_record(root / data)
        places = ["--params", str(root / "params.yaml"), "--data", str(root / data)]
        record, log = (root / f"{number}.{kind}" for kind in ("loaded", "log"))
        request = (stage, [*places, *coordinates], str(record), str(log))
        process = FORKS.Process(target=run_recorded, args=request)
        process.start()
        process.join()
        assert process.exitcode == 0, log.read_text()
        found[cell] = files(record.read_text().splitlines())
    return found


def files(lines: list[str]) -> set[str]:
    """Return the files of module names and opened paths, relative to the project."""
    paths = {
        Path(line) if "/" in line else module_file(line, ROOT)
        for line in lines
        if not line.endswith((".pyc", "__pycache__"))
    }
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path and path.is_file() and path.is_relative_to(ROOT / "tasks")
    }


@pytest.mark.slow
@pytest.mark.xdist_group("loaded")
@pytest.mark.parametrize("cell", STAGES)
def test_a_stage_loads_only_what_is_in_its_digest(
    cell: str, loaded: dict[str, set[str]], values: dict[str, Any]
) -> None:
    assert RECORDED.get(cell, set()) <= loaded[cell]
    known = tuple(POLICY) if cell == "policy" else ()
    rest = loaded[cell] - set(cells(values, ROOT)[cell].digests(ROOT)["files"])
    if cell == "r/allocate":
        # it searches for one line in the files of methods; those with the line are in the digest
        methods = {path for path in rest if path.startswith("tasks/train/methods/")}
        rest -= {path for path in methods if not declared(ROOT / path, "reads_profile")}
    assert {path for path in rest if not is_left_out(path) and not path.startswith(known)} == set()
