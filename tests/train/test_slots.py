"""One contract test a slot, over every file found in it; and the plan's own behaviour."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.params import ParamsError
from tasks.common.registry import names
from tasks.engines.engine import Request as EngineRequest
from tasks.engines.engine import Samples, Sampling
from tasks.train.methods import advantage, control, generate, loss, replay, select
from tasks.train.methods.control import plan as plan_control
from tasks.train.rollouts import Draw, Ints, Request, Rollouts, StepTotals, merge
from tasks.train.settings import BatchSettings
from tasks.train.slots import load_slot

SETTINGS = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "ratio": "token", "normalize": "token"},
    "tis": {"cap": 2.0, "normalize": "sequence"},
    "mc_grpo": {"min_deviation": 1.0},
    "grpo_sample": {"epsilon": 1e-4},
    **{name: {"keep": 2} for name in ("pods", "random", "max_reward")},
    "micro_groups": {"cache_megabytes": 1.0, "order": "lpt"},
    "dapo": {"max_refills": 2},
    "greso": {
        "dead_rate": 0.25,
        "step": 0.01,
        "floor": 0.01,
        "p_start": 0.5,
        "p_min": 0.05,
        "p_max": 0.95,
    },
    "knapsack": {"smallest": 2, "largest": 16, "discount": 0.5},
    "sagc": {
        "group_sizes": [2, 4, 8],
        "threshold": 4.0,
        "budget": 0.2,
        "step": 0.2,
        "memory": 0.99,
        "max_multiplier": 20.0,
    },
}
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
GROUPS = np.array([0, 0, 0, 1, 1, 2, 3, 3])


def arrays(visits: list[tuple[int, int]]) -> dict[str, Ints]:
    """Plan columns of (phase, group_size) visits."""
    phase, size = np.array(visits).T
    return {
        "phase": phase,
        "group_size": size,
        "pass": phase * 0,
        "prompt_row": np.arange(len(visits)),
    }


def rollouts_for(request: Request) -> Rollouts:
    total = int(request.counts.sum())
    samples = Samples([[3, 1]] * total, [[-0.1, -0.2]] * total, ["stop"] * total)
    group_B = np.repeat(np.arange(len(request.counts)), request.counts)
    prompts = [[5]] * len(request.counts)
    return Rollouts(
        request.prompt_rows,
        prompts,
        group_B,
        samples,
        [""] * total,
        ["wrong"] * total,
        np.zeros(total),
    )


@pytest.mark.parametrize("name", names(select))
def test_select(name: str) -> None:
    choose = load_slot(select, {"method": name, **SETTINGS.get(name, {})}, "select", "select")[1]
    first, second = (choose(REWARDS, GROUPS, np.random.default_rng(0)) for _ in range(2))
    assert first.dtype == np.bool_
    assert first.shape == REWARDS.shape
    assert (first == second).all()
    assert choose(REWARDS[:0], GROUPS[:0], np.random.default_rng(0)).shape == (0,)


@pytest.mark.parametrize("name", names(advantage))
def test_advantage(name: str) -> None:
    estimate = load_slot(
        advantage, {"method": name, **SETTINGS.get(name, {})}, "advantage", "advantage"
    )[1]
    advantages = estimate(REWARDS, GROUPS)
    assert np.isfinite(advantages).all()
    assert (advantages[GROUPS == 1] == 0).all()  # equal rewards teach nothing
    assert (advantages[GROUPS == 2] == 0).all()  # nor does a group of one
    assert advantages[0] >= 0 >= advantages[1]
    assert advantages[0] > advantages[1]
    gap = np.array([0, 0, 0, 2, 2, 5, 9, 9])  # groups that select emptied leave gaps
    np.testing.assert_allclose(estimate(REWARDS, gap), advantages)
    assert estimate(REWARDS[:0], GROUPS[:0]).shape == (0,)


@pytest.mark.parametrize("name", names(loss))
def test_loss_adds_up_over_micro_batches(name: str) -> None:
    compute = load_slot(loss, {"method": name, **SETTINGS.get(name, {})}, "loss", "loss")[1]
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (
        torch.randn((8, 5), generator=generator, dtype=torch.float64) for _ in range(2)
    )
    weights, mask = (
        torch.randn(8, generator=generator, dtype=torch.float64),
        torch.arange(5)[None] < torch.arange(8)[:, None],
    )
    whole, stats = compute(logprobs, old, weights, mask, StepTotals(17, 8, 5))
    parts = [
        compute(logprobs[i::3], old[i::3], weights[i::3], mask[i::3], StepTotals(17, 8, 5))
        for i in range(3)
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    assert sum(float(s["clipped"]) for _, s in parts) == float(stats["clipped"])
    changed = torch.where(mask, logprobs, 1e9)  # what the mask hides has no influence
    assert compute(changed, old, weights, mask, StepTotals(17, 8, 5))[0].item() == pytest.approx(
        whole.item()
    )


@pytest.mark.parametrize("name", names(control))
def test_control(name: str) -> None:
    module, start = load_slot(
        control, {"method": name, **SETTINGS.get(name, {})}, "control", "start"
    )
    visits = [(0, 4), (0, 4), (0, 3), (1, 2), (1, 2), (2, 8)]
    state = start(arrays(visits), BatchSettings("rollouts", 8))
    seen, progress = [], [module.progress(state)]
    while (request := module.next(state, [], np.random.default_rng(0))) is not None:
        parts = [rollouts_for(request)]
        while (more := module.next(state, parts, np.random.default_rng(0))) is not None:
            parts.append(rollouts_for(more))
        module.observe(state, merge(parts))
        seen += request.prompt_rows.tolist()
        progress.append(module.progress(state))
    assert seen
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)
    assert all(
        isinstance(value, np.ndarray) and value.dtype.kind in "biuf" for value in state.values()
    )


@pytest.mark.parametrize("name", names(replay))
def test_replay(name: str) -> None:
    module, start = load_slot(replay, {"method": name, **SETTINGS.get(name, {})}, "replay", "start")
    state = start()
    assert module.draw(state, np.random.default_rng(0)) is None  # an empty buffer gives nothing
    module.add(state, rollouts_for(Request(np.array([0]), np.array([2]), 0, 0)))
    assert all(isinstance(value, np.ndarray) for value in state.values())


@pytest.mark.parametrize("name", names(generate))
def test_generate_draws_every_rollout_it_is_asked_for(name: str) -> None:
    class Counting:
        name, version, prefix_block, prefilled_tokens = "hf", "1", 1, 0

        def generate(self, request: EngineRequest, on_finished: object = None) -> Samples:
            seeds = request.seeds
            assert len(set(seeds)) == len(seeds) == sum(request.counts)
            return Samples(
                [[seed] for seed in seeds], [[0.0] for _ in seeds], ["stop" for _ in seeds]
            )

        def cache_bytes(self, positions: int) -> int:
            return 1000 * positions

        def generate_in_order(
            self, request: EngineRequest, order_B: Ints, max_rows: int, on_finished: object = None
        ) -> Samples:
            assert sorted(order_B) == list(range(len(request.seeds)))
            return self.generate(request)

        def set_weights(self, weights: object) -> None: ...

        def sleep(self) -> None: ...

    module, start = load_slot(
        generate, {"method": name, **SETTINGS.get(name, {})}, "generate", "start"
    )
    state = start(9)
    draw = Draw([[1], [2]], [3, 2], [11, 12, 13, 14, 15], Sampling(1.0, 1.0, 0, 4, 0), [7, 8])
    first, second = (module.generate(state, Counting(), draw) for _ in range(2))
    assert sorted(ids[0] for ids in first.token_ids) == draw.seeds
    assert first == second
    module.observe(state, rollouts_for(Request(np.array([7, 8]), np.array([3, 2]), 0, 0)))
    assert all(
        isinstance(value, np.ndarray) and value.dtype.kind in "biuf" for value in state.values()
    )
    assert module.generate(state, Counting(), draw) == first


def test_an_unknown_method_or_setting_is_named() -> None:
    with pytest.raises(
        ParamsError,
        match=r"train\.select\.method is 'pod'; there is: all, max_reward, mixed, pods, random",
    ):
        load_slot(select, {"method": "pod"}, "select", "select")
    with pytest.raises(ParamsError, match=r"train\.loss \(clip\)\.clip_high is missing"):
        load_slot(loss, {"method": "clip", "clip_low": 0.2}, "loss", "loss")
    with pytest.raises(ParamsError, match=r"train\.loss\.method is missing"):
        load_slot(loss, {}, "loss", "loss")


def test_a_step_of_the_plan_never_straddles_phases() -> None:
    state = plan_control.start(
        arrays([(0, 4), (0, 4), (0, 4), (1, 2), (1, 2), (2, 16)]), BatchSettings("rollouts", 8)
    )
    steps = []
    while (request := plan_control.next(state, [], np.random.default_rng(0))) is not None:
        steps.append((request.phase, request.counts.tolist()))
    assert steps == [
        (0, [4, 4]),
        (0, [4]),
        (1, [2, 2]),
        (2, [16]),
    ]  # a group larger than the batch is a step of its own


visits = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=40)


@given(visits, st.integers(1, 20), st.sampled_from(["rollouts", "prompts"]))
def test_the_plan_is_followed_exactly(plan: list[tuple[int, int]], size: int, unit: str) -> None:
    plan = sorted(plan, key=lambda visit: visit[0])
    state = plan_control.start(arrays(plan), BatchSettings(unit, size))  # type: ignore[arg-type]
    rows: list[int] = []
    while (request := plan_control.next(state, [], np.random.default_rng(0))) is not None:
        cost = request.counts.sum() if unit == "rollouts" else len(request.counts)
        assert cost <= size or len(request.counts) == 1
        assert {plan[row][0] for row in request.prompt_rows} == {request.phase}
        assert request.counts.tolist() == [plan[row][1] for row in request.prompt_rows]
        rows += request.prompt_rows.tolist()
    assert rows == list(range(len(plan)))
