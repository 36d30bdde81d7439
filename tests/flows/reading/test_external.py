"""Checkpoints of other trainers are evaluated like the initial policy, and shown in the report."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.reading.comparisons import Request, read
from flows.reading.external import evaluate, show
from tasks.common import params
from tasks.common.artifacts import ROLLOUTS, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest_file, read_json, write_json
from tasks.common.stage import Stage
from tasks.evaluate.evaluation import run_evaluation
from tasks.models.policy import load_model, read_policy
from tests.report.test_external import tables, write_import
from tests.train.worlds import make_world


@pytest.fixture
def layout(tmp_path: Path, guesser: Path) -> Layout:
    """Return a world whose initial policy is evaluated, with a report."""
    layout = make_world(tmp_path / "data", guesser, [2, 2])
    measure(layout)
    layout.report.mkdir()
    (layout.report / "index.html").touch()
    return layout


def values_of(layout: Layout) -> dict[str, Any]:
    return params.load(layout.root / "params.yaml") | {"report": {"num_bootstrap": 50}}


def measure(layout: Layout) -> None:
    run = Stage.unrecorded("baseline", values_of(layout), layout)
    run_evaluation(run, read_policy(layout), layout.baseline)


@pytest.fixture
def checkpoint(tmp_path: Path, guesser: Path) -> Path:
    """Return a policy with the guesser's tokenizer that always answers 7, which is correct."""
    folder = shutil.copytree(guesser, tmp_path / "checkpoint")
    model = load_model(guesser, dtype=torch.float32, device=torch.device("cpu"))
    seven = ord("7") - 29  # a token
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        for digit in "68":
            head[ord(digit) - 29] = head[seven] * 0.1
    model.save_pretrained(folder)
    return folder


def test_a_checkpoint_is_evaluated_once_and_shown(layout: Layout, checkpoint: Path) -> None:
    """A second evaluation samples nothing. Its tokens are unknown until rollouts have its name."""
    values = values_of(layout)
    said = evaluate(layout, values, checkpoint, "other")
    assert said.startswith("name external/other; policy ")
    assert "pass@1 100.0%" in said
    assert said.endswith("tokens sampled unknown")
    before = read_checked(layout.baseline / "metrics.json")["pass_at_1"]
    folder = layout.external("other")
    rows = ROLLOUTS.read(folder / "eval" / "rollouts.parquet")
    assert len(rows) == 6 * (2 + 1)
    note = layout.root / "draws" / "external" / "other.json"
    assert read_json(note)["sampled"]["said"].startswith("0 rollouts reused, 12 sampled")
    digest = digest_file(folder / "eval" / "rollouts.parquet")
    assert evaluate(layout, values, checkpoint, "other") == said
    assert read_json(note)["sampled"]["said"] == "12 rollouts reused, 0 sampled"
    assert digest_file(folder / "eval" / "rollouts.parquet") == digest
    heading, text, *_ = read(layout, "external/other/eval", None, Request(None, None, 1, 1))
    assert heading == "6 of 6 test prompts; external/other/eval"
    assert "before, 100% after" in text

    write_import(layout, "other", {"p0": "cw"})
    show(layout, values)
    [[_, row], [_, imported]] = tables(layout)
    assert row[2] == "100.0%"
    assert row[5].startswith(f"{100 * (1 - before):+.1f} (")
    assert (row[6], imported[0]) == ("22", "external/other")
    changed = ROLLOUTS.read(layout.baseline / "rollouts.parquet").reverse()
    ROLLOUTS.write(layout.baseline / "rollouts.parquet", changed)
    show(layout, values)
    assert tables(layout)[0][1][5] == "–"  # of another baseline


def test_a_checkpoint_that_cannot_be_compared_is_refused(
    layout: Layout, checkpoint: Path, llama: Path, tmp_path: Path
) -> None:
    values = values_of(layout)
    with pytest.raises(ArtifactError, match="the checkpoint in .* has another vocabulary"):
        evaluate(layout, values, llama, "other")
    stops = {"eos_token_id": [1, 5]}
    write_json(checkpoint / "generation_config.json", stops)
    with pytest.raises(ArtifactError, match="has other stop tokens than the policy in"):
        evaluate(layout, values, checkpoint, "other")
    (checkpoint / "generation_config.json").unlink()
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    write_json(checkpoint / "tokenizer_config.json", settings | {"chat_template": "{{ 'x' }}"})
    with pytest.raises(ArtifactError, match="has other prompts than the policy in"):
        evaluate(layout, values, checkpoint, "other")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").touch()
    with pytest.raises(ArtifactError, match="contains only pickled weights"):
        evaluate(layout, values, pickled, "other")
    values["evaluate"] = {**values["evaluate"], "num_samples": 3}
    with pytest.raises(ArtifactError, match="was evaluated with other parameters"):
        evaluate(layout, values, checkpoint, "other")
    values = values_of(layout)
    values["sampling"] = {**values["sampling"], "temperature": 0.5}
    with pytest.raises(ArtifactError, match="was evaluated with other parameters"):
        evaluate(layout, values, checkpoint, "other")
    assert not layout.external("other").exists()
