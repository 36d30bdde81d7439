"""The stage policy: supervised training on demonstrations."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.artifacts import Layout
from tasks.common.params import ParamsError, parse
from tasks.common.stage import StageError
from tasks.ingest.demonstrations import demonstrations
from tasks.models.policy import load_model, load_tokenizer, read_policy
from tasks.models.prompts import decode
from tasks.policy import supervised
from tasks.policy.run import provide
from tasks.policy.settings import Policy, Training
from tasks.policy.supervised import draw, encoded
from tasks.policy.training import check, micro_batches
from tests.ingest.helpers import entry, lines
from tests.train.worlds import Killed

TRAINING = {"tokens": 1500, "batch_size": 4, "batches_per_bucket": 2, "learning_rate": 3e-3}


@pytest.fixture
def values(tmp_path: Path, llama: Path) -> dict[str, Any]:
    """Return a section `policy`: the small Llama, trained on sums with one-word solutions."""
    rows = [{"question": f"{n} + 1 =", "gold": n + 1, "way": f"= {n + 1}"} for n in range(12)]
    source = entry(lines(tmp_path / "a.jsonl", *rows), solution="way")
    return {"source": str(llama), "supervised": {"sources": [source], "training": TRAINING}}


def policy(values: dict[str, Any], **training: Any) -> Policy:
    whole = copy.deepcopy(values)
    whole["supervised"]["training"] |= training
    return parse(whole, Policy, "policy")


def weights(layout: Layout) -> dict[str, torch.Tensor]:
    folder, cpu = read_policy(layout).folder, torch.device("cpu")
    return load_model(folder, dtype=torch.float32, device=cpu).state_dict()


def test_policy_learns_its_demonstrations_and_records_their_cost(
    tmp_path: Path, values: dict[str, Any], llama: Path
) -> None:
    layout, curve = Layout(tmp_path / "data"), list[tuple[int, float]]()
    card = provide(policy(values), layout, record=lambda *point: curve.append(point))
    assert (card["source"], card["location"]) == (str(llama), None)
    assert read_policy(layout).digest == card["digest"]
    assert curve[-1][0] >= 1500
    assert curve[-1][1] < 0.5 * curve[0][1]
    trained = card["supervised"]
    assert (trained["demonstrations"], trained["tokens"]) == (12, curve[-1][0])
    assert trained["flops"] == 6 * card["num_matmul_parameters"] * trained["tokens"]
    tokenizer = load_tokenizer(layout.policy)
    [row, *_] = demonstrations(policy(values).supervised)
    [(ids, num_prompt)] = encoded([row], read_policy(layout), tokenizer)
    assert ids[0] == tokenizer.bos_token_id  # as a prompt is sampled
    assert ids[-1] == tokenizer.eos_token_id
    assert decode([ids[num_prompt:]], ["stop"], tokenizer) == [row.solution]


def test_adapters_are_added_to_the_weights_of_their_layers(
    tmp_path: Path, values: dict[str, Any], llama: Path
) -> None:
    layout, losses = Layout(tmp_path / "data"), list[float]()
    adapters = {"rank": 4, "alpha": 8.0, "modules": ["q_proj", "v_proj"]}
    settings = policy(values, lora=adapters, learning_rate=3e-2)
    card = provide(settings, layout, record=lambda _, loss: losses.append(loss))
    assert losses[-1] < 0.9 * losses[0]
    passes = card["supervised"]["flops"] / (2 * card["num_matmul_parameters"])
    assert 2 < passes / card["supervised"]["tokens"] < 3
    before = load_model(llama, dtype=torch.float32, device=torch.device("cpu")).state_dict()
    after = weights(layout)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}
    delta = after[min(changed)] - before[min(changed)]
    assert int(torch.linalg.matrix_rank(delta, rtol=1e-3)) == 4


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2, "alpha": 4.0}}])
def test_killed_training_continues_to_the_same_weights(
    tmp_path: Path,
    values: dict[str, Any],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values["supervised"]["training"] = TRAINING | changes
    whole, cut = Layout(tmp_path / "whole"), Layout(tmp_path / "cut")
    provide(policy(values), whole)
    uncut = supervised.draw

    def killed(*arguments: Any) -> Any:
        stream = uncut(*arguments)
        yield next(stream)
        yield next(stream)
        raise Killed

    monkeypatch.setattr(supervised, "draw", killed)
    with pytest.raises(Killed):
        provide(policy(values), cut, every_seconds=0.0)
    assert not cut.policy.exists()
    starts = []
    monkeypatch.setattr(supervised, "draw", lambda *a: starts.append(a[-1]) or uncut(*a))
    provide(policy(values), cut, every_seconds=1e9)
    assert starts == [1]  # the checkpoint is within the second chunk, at its end
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(cut)[name])


def test_micro_batches_and_autocast_change_only_the_rounding(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    found = []
    for number, changes in enumerate(({}, {"max_tokens_per_micro_batch": 9}, {"autocast": True})):
        layout = Layout(tmp_path / str(number))
        provide(policy(values, tokens=60, **changes), layout)
        found.append(torch.cat([each.flatten() for each in weights(layout).values()]))
    assert not torch.equal(found[0], found[2])
    assert torch.allclose(found[0], found[1], atol=1e-4)
    rows = [([0] * length, 1) for length in (3, 3, 4, 9)]
    parts = [[len(ids) for ids, _ in part] for part in micro_batches(rows, 8)]
    assert parts == [[3, 3], [4], [9]]


def test_every_pass_has_every_row_in_another_order() -> None:
    rows = [([n], 1) for n in range(5)]
    stream = draw(rows, 3, 0, 0)
    places = [ids[0] for _ in range(5) for ids, _ in next(stream)]
    passes = [places[start : start + 5] for start in (0, 5, 10)]
    assert [sorted(each) for each in passes] == [list(range(5))] * 3
    assert passes[0] != passes[1]
    assert next(draw(rows, 3, 0, 1)) == [([n], 1) for n in places[3:6]]


@pytest.mark.parametrize(
    ("changes", "training", "message"),
    [
        ({}, {"learning_rate": 1e6}, r"diverged: .*Lower its learning_rate, which is 1e\+06"),
        ({"solution": None}, {}, "none of 12 rows has a worked solution: use a source that"),
        ({"path": "none.jsonl"}, {}, "none.jsonl"),
        ({"preset": "gsm8"}, {}, r"policy.supervised.sources\[0\].preset .*did you mean gsm8k"),
    ],
)
def test_what_cannot_be_learned_is_named_and_no_policy_is_saved(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], training: Any, message: str
) -> None:
    layout = Layout(tmp_path / "data")
    [source] = values["supervised"]["sources"]
    for key, value in changes.items():
        (source if key in source else source["settings"])[key] = value
    with pytest.raises((StageError, ParamsError, ValueError), match=message) as raised:
        provide(policy(values, **training), layout, every_seconds=0.0)
    assert not [*layout.checkpoints.glob("*")]  # it would go on from diverged weights
    assert "\n" not in str(raised.value)
    assert not layout.policy.exists()


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    for curve in ([math.nan], [1.0, math.nan], [1.0, math.inf], [1.0, 2.1]):
        with pytest.raises(StageError, match="Lower its learning_rate, which is 0.003"):
            check(curve, Training())
    check([1.0, 1.9], Training())


def test_other_demonstrations_make_another_policy(tmp_path: Path, values: dict[str, Any]) -> None:
    first = policy(values)
    other = dataclasses.replace(first.supervised, seed=1, max_examples=3)
    assert len(demonstrations(other)) == 3
    assert demonstrations(other) != demonstrations(first.supervised)[:3]
