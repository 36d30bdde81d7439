"""More groups in flight than a step takes: every group is used once and complete, no token is older
than the limit, and each has the log-probability of the policy that sampled it."""

import dataclasses
import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common.artifacts import STEPS, Layout
from tasks.common.params import ParamsError
from tasks.engines.engine import IsEnough, Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.train.data.columns import UNFINISHED
from tasks.train.data.rollouts import Features
from tasks.train.loop.queue import Batch
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import request_for
from tasks.train.sampling.grading import samples_of
from tests.train import test_sharding as sharding
from tests.train.recorded import check_repeated, rollouts_of
from tests.train.worlds import make_trainer, make_world, run, sampled

SIZES = [4, 2, 6] * 8  # eight steps of three groups, four in each phase
CHANGES: dict[str, Any] = {
    "over_provision": 2.0,
    "max_staleness": 1,
    "learning_rate": 3e-2,
    "advantage": {"method": "rloo"},
}


def used_groups(layout: Layout) -> Counter[tuple[str, int]]:
    """Return the groups of a run's updates, by prompt and size."""
    rows = rollouts_of(layout)
    groups = rows.group_by("step", "group").agg(pl.first("prompt_id"), pl.len())
    return Counter(groups.select("prompt_id", "len").rows())


PLANNED = Counter((f"p{visit % 6}", size) for visit, size in enumerate(SIZES))


@pytest.mark.parametrize(("factor", "limit"), [(1.3, 1), (2.0, 3)])
def test_every_group_is_used_once_and_none_is_too_old(
    factor: float, limit: int, guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path / "first", guesser, SIZES)
    changes = {**CHANGES, "over_provision": factor, "max_staleness": limit}
    trainer = run(layout, changes)
    assert used_groups(layout) == PLANNED
    assert trainer.state.num_steps == 8
    assert trainer.queue.batches == []
    assert trainer.state.ledger.rollouts["generate"] == sum(SIZES)

    rows = rollouts_of(layout)
    made = np.cumsum([0, *STEPS.frame(trainer.state.steps)["num_updates"]])
    age = made[rows["step"].to_numpy()] - rows["version"].to_numpy()
    assert age.min() == 0 < age.max() <= limit
    continued = rows.filter(pl.col("versions").is_not_null())
    assert len(continued) > 0
    assert (continued["versions"].list.min() == continued["version"]).all()
    assert (continued["versions"].list.len() == continued["token_ids"].list.len()).all()
    lengths = map(len, trainer.prompts.token_ids(np.arange(6)))
    prompt_tokens = dict(zip(trainer.prompts.ids, lengths, strict=True))
    pairs = rows["prompt_id", "token_ids"].rows()
    tokens = sum(len(ids) + prompt_tokens[name] for name, ids in pairs)
    assert trainer.state.ledger.tokens["generate"] == tokens

    # the engine decides which groups complete first; the record determines the rest
    again = make_world(tmp_path / "again", guesser, SIZES)
    repeated = check_repeated(layout, again, changes)
    assert repeated.state.ledger.tokens["generate"] == tokens
    # after a step without an update, the record does not show that tokens were read again
    executed = [each.state.ledger.executed["generate"] for each in (repeated, trainer)]
    assert 0 < executed[0] <= executed[1]


def test_a_run_with_a_prompt_twice_in_flight_is_reproduced(guesser: Path, tmp_path: Path) -> None:
    """Groups are in the order of the record, which determines minibatches."""
    changes = {
        **CHANGES,
        "learning_rate": 3e-3,
        "batch": {"unit": "rollouts", "size": 24, "counts": "generated"},
        "updates": {"epochs": 1, "minibatches": 2},
    }

    def first_prompt_last(trainer: Trainer) -> None:
        engine = trainer.collector.engine
        assert isinstance(engine, HfEngine)

        def generate_until(request: Request, is_enough: IsEnough) -> Samples:
            order_B = np.argsort(request.owner_B() == 0, kind="stable")
            return engine.decode(request, order_B, 4, 0.0, is_enough)

        engine.generate_until = generate_until  # type: ignore[method-assign]

    layouts = [make_world(tmp_path / name, guesser, [4] * 48) for name in ("first", "again")]
    run(layouts[0], changes, prepare=first_prompt_last)
    check_repeated(*layouts, changes)


def scale(trainer: Trainer, weights: dict[str, torch.Tensor], version: int) -> None:
    """Scale the weights of the policy by its version."""
    with torch.no_grad():
        for name, tensor in trainer.learner.model.state_dict().items():
            tensor.copy_(weights[name] * (1.0 + 0.2 * version))


def test_a_continued_rollout_has_the_log_probabilities_of_its_policies(
    guesser: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, [4, 2, 6] * 12), **CHANGES)
    model = trainer.learner.model
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gaps, flops, again = dict[int, list[float]](), 0.0, 0.0
    carried = 0
    with closing(trainer.collector.grader):
        for version in range(12):
            scale(trainer, weights, version)
            trainer.learner.version = trainer.state.num_steps = version
            batch = sampled(trainer)
            carried += sum(map(num_begun, trainer.queue.batches))
            fresh = batch.fresh
            versions_N = fresh.versions_N()
            for old in set(versions_N.tolist()):
                scale(trainer, weights, old)
                seen = trainer.learner.score(fresh, Features(), trainer.slots.loss)[0]
                gap_N = np.abs(seen.logprobs_N - fresh.logprobs_N)
                gaps.setdefault(version - old, []).extend(gap_N[versions_N == old])
            flops += batch.cost.flops
            again += cost_of(trainer, batch)
        assert not trainer.queue.fill(version=12)
    assert carried > 20
    assert set(gaps) == {0, 1}
    assert len(gaps[1]) > 20
    assert max(map(max, gaps.values())) < 1e-4
    assert flops == pytest.approx(again, rel=1e-12)


def num_begun(batch: Batch) -> int:
    """Return the number of a waiting batch's unfinished rollouts with tokens."""
    begun = pl.col("token_ids").list.len() > 0
    return len(batch.fresh.table.filter((pl.col("reason") == UNFINISHED) & begun))


def cost_of(trainer: Trainer, batch: Batch) -> float:
    """Return the FLOPs of sampling a batch, whose groups are read again at each other version."""
    nothing: list[list[int]] = [[]] * len(batch.fresh.table)
    unsampled = batch.fresh.with_columns(token_ids=nothing, reason=UNFINISHED).table
    request, _, _ = request_for(unsampled, trainer.run.sampling)
    return trainer.collector.cost(request, samples_of(batch.fresh.table)).flops


def test_a_step_waits_for_a_late_group(guesser: Path, tmp_path: Path) -> None:
    """The engine decodes the run's first prompt last. One of three steps of age is for sampling
    ahead."""
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **{**CHANGES, "max_staleness": 3})
    engine = trainer.collector.engine
    assert isinstance(engine, HfEngine)
    first = trainer.prompts.token_ids(np.array([0]))[0]

    def generate_first_prompt_last(request: Request, is_enough: IsEnough) -> Samples:
        is_first_prompt = np.array([prompt[: len(first)] == first for prompt in request.prompts])
        order_B = np.argsort(is_first_prompt[request.owner_B()], kind="stable")
        return engine.decode(request, order_B, 4, 0.0, is_enough)

    engine.generate_until = generate_first_prompt_last  # type: ignore[method-assign]
    taken = []
    with closing(trainer.collector.grader):
        for step in range(4):
            trainer.state.num_steps = trainer.learner.version = step
            batch = sampled(trainer)
            taken.append(batch.fresh.prompt_rows_Q.tolist())
    assert taken == [[1, 2, 3], [4, 5, 1], [0, 2, 3], [0, 4, 5]]


def test_an_engine_that_cannot_be_stopped_is_refused(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **CHANGES)

    class Plain:
        name = "plain"

        def generate(self, request: Request, *more: Any) -> Samples:
            raise AssertionError("it must not sample")

    trainer.collector.engine = Plain()  # type: ignore[assignment]
    with closing(trainer.collector.grader), pytest.raises(ParamsError, match="the engine plain"):
        sampled(trainer)


def test_a_step_with_too_few_complete_groups_is_refused(guesser: Path, tmp_path: Path) -> None:
    """The engine loses finished rollouts."""
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **CHANGES)
    engine = trainer.collector.engine
    assert isinstance(engine, HfEngine)
    generate = engine.generate_until

    def losing(request: Request, is_enough: IsEnough) -> Samples:
        samples = generate(request, is_enough)
        return dataclasses.replace(samples, finish_reasons=[UNFINISHED] * len(samples.token_ids))

    engine.generate_until = losing  # type: ignore[method-assign]
    message = "step 0: sampling ended with 0 complete groups, but control requested 3"
    with closing(trainer.collector.grader), pytest.raises(TrainingError, match=message):
        sampled(trainer)


def test_two_ranks_sample_the_groups_of_one_process(guesser: Path, tmp_path: Path) -> None:
    """Each rank stops when its share is complete, so the order of groups differs."""
    case = {"train": {**CHANGES, "learning_rate": 1e-3}}
    found = {}
    for name, shard, size, changes in (
        ("plain", "none", 0, {}),
        ("two", "none", 2, case),
        ("sharded", "fsdp2", 2, case),
    ):
        layout = sharding.world(tmp_path / name, guesser, changes, shard)
        out = sharding.run(layout, size, 6, tmp_path / f"{name}-out")
        steps = json.loads((out / "steps.json").read_text())
        rows = sharding.rollouts_of(layout)
        groups = rows.group_by("step", "group").agg(pl.first("prompt_id"), pl.len())
        visits = sorted(groups.select("prompt_id", "len").rows())
        found[name] = ([row["num_prompts"] for row in steps], visits, rows)
    assert found["plain"][:2] == found["two"][:2] == found["sharded"][:2]
    two, sharded = found["two"][2], found["sharded"][2]
    # the norm of a sharded gradient, which clips it, is summed in another order
    assert two.drop("sampler_logprobs").equals(sharded.drop("sampler_logprobs"))
    gaps = two["sampler_logprobs"].explode() - sharded["sampler_logprobs"].explode()
    assert gaps.abs().max() < 1e-5
    assert found["two"][2]["versions"].is_not_null().any()
