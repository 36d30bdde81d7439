"""One contract test per slot, over every file in it."""

import copy
import tracemalloc
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common import registry
from tasks.common.artifacts import PROMPTS, SAMPLES
from tasks.common.params import ParamsError
from tasks.common.registry import names
from tasks.engines.engine import OnEnded, Request, Samples
from tasks.engines.settings import Sampling
from tasks.train.data.columns import Floats, Ints, nested
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Observed, Rollouts, StepTotals, merge
from tasks.train.data.tokens import Tokens
from tasks.train.loading import load_method
from tasks.train.methods import advantage, control, generate, loss, replay, select, shape
from tasks.train.settings import BatchSettings
from tasks.train.slots import Advantage, Control, Replay, SoFar, fill_state, values_of
from tests.train.steps import (
    START,
    after,
    answer_to,
    asked_of,
    observed_of,
    passes_of,
    plan_of,
    play,
    prompts_of,
    requested,
    rollouts_of,
)

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
GROUPS = np.array([0, 0, 0, 1, 1, 2, 3, 3])


def example(package: ModuleType, name: str) -> dict[str, Any]:
    module = registry.load(package, name, "method")
    if not hasattr(module, "Settings"):
        return {"method": name}
    settings = module.EXAMPLE if hasattr(module, "EXAMPLE") else module.Settings()
    return {"method": name, **asdict(settings)}


def make(package: ModuleType, name: str, *arguments: Any, profile: Profile | None = None) -> Any:
    spec, prompts = example(package, name), prompts_of(1000)
    slot = package.__name__.rpartition(".")[2]
    return load_method(slot, spec, *arguments, prompts=prompts, profile=profile)


def check_state_is_restored(method: Any) -> None:
    """Check that a checkpoint restores the whole state of a method."""
    if method.state is None:
        return
    saved = values_of(method.state)
    is_table = {name: isinstance(value, pl.DataFrame) for name, value in saved.items()}
    assert all(is_table[name] or saved[name].dtype.kind in "biuf" for name in saved)
    again = copy.deepcopy(method)
    fill_state(again.state, saved)
    for name, value in vars(method.state).items():
        found = getattr(again.state, name)
        assert type(found) is type(value)
        assert found.equals(value) if is_table[name] else np.array_equal(found, value)


@pytest.mark.parametrize("name", names(select))
def test_select(name: str) -> None:
    choose, rollouts = make(select, name), observed_of(rollouts_of(REWARDS, GROUPS))
    first, second = (choose(rollouts, np.random.default_rng(0)) for _ in range(2))
    assert first.dtype == np.bool_
    assert first.shape == REWARDS.shape
    assert (first == second).all()
    assert choose(observed_of(rollouts_of([], [])), np.random.default_rng(0)).shape == (0,)
    if (keep := example(select, name).get("keep")) is not None:
        assert np.bincount(GROUPS, first).tolist() == [
            min(size, keep) for size in np.bincount(GROUPS)
        ]
    check_state_is_restored(choose)


def solved_half() -> Profile:
    """Return a profile of the prompts, each with a correct and a wrong sample."""
    prompts = prompts_of(1000)
    rows = [
        {**SAMPLES.example, "prompt_id": prompt_id, "sample_index": k, "outcome": outcome}
        for prompt_id in prompts["prompt_id"].head(20)
        for k, outcome in enumerate(("correct", "wrong"))
    ]
    table = SAMPLES.frame(rows).with_columns(reward=(pl.col("outcome") == "correct").cast(float))
    return Profile(table, Prompts(prompts, lambda rows: []))


@pytest.mark.parametrize("name", names(advantage))
def test_advantage(name: str) -> None:
    estimate: Advantage = make(advantage, name, profile=solved_half())
    advantages = estimate(observed_of(rollouts_of(REWARDS, GROUPS)))
    assert np.isfinite(advantages).all()
    if estimate.needs_group:
        assert (advantages[GROUPS == 1] == 0).all()  # equal rewards give no gradient
        assert (advantages[GROUPS == 2] == 0).all()  # nor do groups of one
    else:
        assert (advantages[GROUPS == 2] != 0).all()
    assert advantages[0] >= 0 >= advantages[1]
    assert advantages[0] > advantages[1]
    gap = [0, 0, 0, 2, 2, 5, 9, 9]  # emptied groups leave gaps
    np.testing.assert_allclose(estimate(observed_of(rollouts_of(REWARDS, gap))), advantages)
    assert estimate(observed_of(rollouts_of([], []))).shape == (0,)
    check_state_is_restored(estimate)


@pytest.mark.parametrize("name", names(advantage))
def test_an_advantage_does_not_depend_on_group_order_or_a_restart(name: str) -> None:
    estimate: Advantage = make(advantage, name, profile=solved_half())
    lengths = [3, 1, 4, 2, 2, 5, 1, 3]
    steps = [observed_of(rollouts_of(REWARDS, GROUPS, lengths), seed) for seed in range(3)]
    for rollouts in steps[:2]:  # some methods update their state
        estimate(rollouts)
        estimate.observe(rollouts)
    found, last = estimate(steps[2]), steps[2]
    assert np.isfinite(found).all()
    assert len(found) in (len(REWARDS), sum(lengths))
    again: Advantage = make(advantage, name, profile=solved_half())
    if estimate.state is not None:
        fill_state(again.state, values_of(estimate.state))
    np.testing.assert_array_equal(again(last), found)
    order = np.array([6, 7, 0, 1, 2, 5, 3, 4])
    places = order if len(found) == len(order) else last.places(order)
    np.testing.assert_allclose(again(last.take(order)), found[places], atol=1e-12)
    of_one = np.array([5]) if len(found) == len(order) else last.places(np.array([5]))
    assert (found[of_one] == 0).all() or not estimate.needs_group or estimate.min_group == 1


@pytest.mark.parametrize("name", names(shape))
def test_shape(name: str) -> None:
    """Groups are independent, and the order of rows matters only for random shapes."""
    change, lengths = make(shape, name), [3, 1, 4, 2, 2, 5, 1, 3]
    rollouts = rollouts_of(REWARDS, GROUPS, lengths)
    logprobs = nested(-np.random.default_rng(1).exponential(size=sum(lengths)), np.array(lengths))
    rollouts = observed_of(rollouts.with_columns(logprobs=logprobs))
    rollouts = rollouts.with_columns(reason=["stop"] * 5 + ["length"] * 3)
    given_B = np.array([1.5, -0.5, -1.0, 0.2, 0.3, -0.4, 2.0, -1.0])
    for _ in range(2):  # some methods have a state
        change.observe(rollouts)
    check_state_is_restored(change)
    rewards, given = change.rewards(rollouts, 6), given_B[rollouts.owner_N()]
    assert rewards.shape == REWARDS.shape

    def shaped(seed: int) -> Floats:
        found: Floats = change.advantages(rollouts, given, np.random.default_rng(seed))
        return found

    advantages = shaped(0)
    assert (advantages == shaped(0)).all()
    assert advantages.shape == given.shape
    assert np.isfinite([*rewards, *advantages]).all()
    has_effect = (rewards != REWARDS).any() or (advantages != given).any()
    assert has_effect != change.drops_cut  # the trainer drops the rollouts
    order = np.array([6, 7, 2, 0, 1, 5, 4, 3])
    turned, places = rollouts.take(order), rollouts.places(order)
    np.testing.assert_allclose(change.rewards(turned, 6), rewards[order])
    if all((shaped(seed) == advantages).all() for seed in range(1, 9)):
        found = change.advantages(turned, given[places], np.random.default_rng(0))
        np.testing.assert_allclose(found, advantages[places])
    nothing = observed_of(rollouts_of([], []))
    assert change.rewards(nothing, 6).shape == (0,)
    assert change.advantages(nothing, np.zeros(0), np.random.default_rng(0)).shape == (0,)


def tokens_of(lengths: list[int], rows: list[int], seed: int = 0) -> Tokens:
    """Return random tokens of the rollouts `rows`; rollout i has `lengths[i]` of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((5, sum(lengths)), generator=generator, dtype=torch.float64)
    values[2] = values[2].exp()
    owners = np.repeat(np.arange(len(lengths)), lengths)
    places = np.flatnonzero(np.isin(owners, rows))
    row_N = torch.from_numpy(np.searchsorted(rows, owners[places]))
    last_N = values[4, places]
    tokens = Tokens(*values[:4, places], row_N, len(rows), last_N, last_N > 0)
    return replace(tokens, sampler_logprobs_N=last_N)


@pytest.mark.parametrize("name", names(loss))
def test_loss_adds_up_over_micro_batches(name: str) -> None:
    compute, totals = make(loss, name), StepTotals(28, 8, 9)
    lengths = [1, 2, 3, 4, 5, 6, 1, 6]
    whole, stats = compute(tokens_of(lengths, list(range(8))), totals)
    parts = [compute(tokens_of(lengths, list(range(i, 8, 3))), totals) for i in range(3)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    assert sum(float(s["clipped"].sum()) for _, s in parts) == float(stats["clipped"].sum())
    check_state_is_restored(compute)


VISITS = [(0, 4), (0, 4), (0, 3), (1, 2), (1, 2), (2, 8)]


def solved(row: int) -> float:
    """Return 0 or 1: half of the prompts are always solved, the others never."""
    return float(row % 2)


@pytest.mark.parametrize("name", names(control))
def test_the_cost_of_a_step_of_control_does_not_grow_with_the_plan(name: str) -> None:
    """Neither the memory of a step nor the size of a checkpoint grows."""
    plan = passes_of(1000, 4, 200)
    phases = np.zeros(len(plan), dtype=np.int64)  # a single phase
    method: Control = make(control, name, replace(plan, phases_V=phases), profile=solved_half())
    rng = np.random.default_rng(0)
    method.next(START, rng)
    method.progress()  # sums over the plan are computed once
    tracemalloc.start()
    method.next(START, rng)
    method.progress()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # a column of the plan has 1,600,000 bytes
    assert (
        sum(array.size for array in values_of(method.state).values()) < 20_000
    )  # numbers per prompt, not per visit (200,000)


@pytest.mark.parametrize("name", names(control))
def test_control(name: str) -> None:
    method: Control = make(control, name, plan_of(VISITS), profile=solved_half())
    progress = [method.progress()]
    while step := play(method, np.random.default_rng(0), solved):
        _, rollouts = step
        method.observe(rollouts)
        progress.append(method.progress())
        assert all(isinstance(value, float) for value in method.describe().values())
        check_state_is_restored(method)
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["dots", "dps", "gdro", "knapsack"])
def test_a_control_describes_the_prompts_of_its_plan(name: str) -> None:
    method = make(control, name, replace(plan_of([(0, 4)] * 2), prompt_rows_V=np.array([8, 9])))
    while step := play(method, np.random.default_rng(0), solved):
        method.observe(step[1])
    described = method.describe()
    assert described.get("seen_rate", described.get("solved_prompts_rate", 0.0) * 2) == 1.0


@pytest.mark.parametrize("name", names(control))
def test_a_control_continues_beyond_the_plan_within_its_budget(name: str) -> None:
    """A request never exceeds the rest of the budget by more than a group."""
    plan = plan_of(VISITS)
    method: Control = make(control, name, plan, profile=solved_half())
    rng, num_steps = np.random.default_rng(0), 3 * len(VISITS)
    largest = int(plan.group_sizes_V.max())
    for step in range(num_steps):
        so_far = SoFar(None, 0, 0, done=step / num_steps, most=2)
        request = requested(method, rng, so_far)
        assert len(request.counts) == 1
        assert request.counts.sum() <= max(largest, 2)
        method.observe(answer_to(request))
    assert plan.num_rollouts() < num_steps * 2


@pytest.mark.parametrize("name", names(control))
def test_a_resumed_control_makes_the_same_requests(name: str) -> None:
    def rest(method: Control, first: int) -> list[Any]:
        requests = []
        for step in range(first, 9):
            if not (found := play(method, np.random.default_rng(step), solved)):
                break
            requests += [(r.prompt_rows.tolist(), r.counts.tolist()) for r in found[0]]
            method.observe(found[1])
        return requests

    whole: Control = make(control, name, plan_of(VISITS * 2), profile=solved_half())
    found = play(whole, np.random.default_rng(0), solved)
    assert found
    whole.observe(found[1])
    resumed: Control = make(control, name, plan_of(VISITS * 2), profile=solved_half())
    fill_state(resumed.state, values_of(whole.state))
    assert rest(resumed, 1) == rest(whole, 1)


@pytest.mark.parametrize("name", names(control))
def test_a_control_accepts_a_step_without_graded_rollouts(name: str) -> None:
    method: Control = make(control, name, plan_of(VISITS), profile=solved_half())
    request = method.next(START, np.random.default_rng(0))
    assert request
    rollouts = answer_to(request, errors=int(request.counts.sum()))
    method.next(after(rollouts), np.random.default_rng(1))
    method.observe(rollouts)
    assert np.isfinite(list(method.describe().values())).all()


def refuse_to_score(rollouts: Rollouts) -> Observed:
    raise AssertionError("there is nothing to score")


@pytest.mark.parametrize("name", names(replay))
def test_replay(name: str) -> None:
    profile = Profile(SAMPLES.frame([]), Prompts(PROMPTS.frame([]), lambda rows: []))
    method: Replay = make(replay, name, profile=profile)
    batch = BatchSettings("rollouts", 8, "generated")
    assert method.room(batch) == 0  # an empty buffer has no room
    assert method.draw(np.random.default_rng(0), 0, batch) is None
    method.prepare(refuse_to_score)
    steps = [
        rollouts_of(REWARDS, GROUPS, lengths=[2] * 8, prompt_rows=[4 * n + i for i in range(4)])
        for n in range(3)
    ]
    for rollouts in steps:
        method.add(rollouts)
    room = method.room(batch)
    assert 0 <= room <= 8
    drawn = method.draw(np.random.default_rng(0), room, batch)
    assert (drawn is None) == (room == 0)
    if drawn is not None:
        assert drawn.replayed_B.all()
        assert len(drawn.group_B) <= room
        assert np.isfinite(drawn.logprobs_N).all()
        assert merge([steps[0], drawn]).replayed_B.sum() == len(drawn.group_B)
    check_state_is_restored(method)


class CountingEngine:
    """An engine whose completions are their own seed; it implements the protocol of scheduling."""

    name, version, prefix_block = "hf", "1", 1
    shares_weights = True

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Any:
        assert len(set(request.seeds)) == len(request.seeds) == sum(request.counts)
        return Samples(
            [[seed] for seed in request.seeds],
            [[0.0] for _ in request.seeds],
            ["stop" for _ in request.seeds],
        )

    def set_weights(self, weights: object) -> None:
        """Weights make no difference."""

    def metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        """There is no memory to release."""

    def cache_bytes(self, positions: int) -> int:
        return 1000 * positions

    def generate_in_order(self, request: Request, order_B: Ints, max_rows: int) -> Samples:
        assert sorted(order_B) == list(range(len(request.seeds)))
        return self.generate(request)


@pytest.mark.parametrize("name", names(generate))
def test_generate_samples_every_requested_rollout(name: str) -> None:
    method = make(generate, name, 9)
    seeds = [11, 12, 13, 14, 15]
    request = Request([[1], [2]], [3, 2], seeds, Sampling(1.0, 1.0, 0, 4, 0))
    context = asked_of(np.array([7, 8]), ["7", "8"])
    others = replace(context, prompt_rows=None)  # prompts of validation
    first, second = (method.generate(CountingEngine(), request, context) for _ in range(2))
    assert sorted(ids[0] for ids in first.token_ids) == seeds
    assert first == second
    method.observe(rollouts_of([0.0] * 5, [0, 0, 0, 1, 1], prompt_rows=[7, 8]))
    check_state_is_restored(method)
    assert method.generate(CountingEngine(), request, context) == first
    assert method.generate(CountingEngine(), request, others) == first


def test_an_unknown_method_or_setting_is_named() -> None:
    message = rf"train\.select\.method is 'pod'; use: {', '.join(names(select))}"
    with pytest.raises(ParamsError, match=message):
        load_method("select", {"method": "pod"})
    with pytest.raises(ParamsError, match=r"train\.select \(pods\)\.keep is missing"):
        load_method("select", {"method": "pods"})
    with pytest.raises(ParamsError, match=r"train\.select \(all\)\.keep is unknown"):
        load_method("select", {"method": "all", "keep": 2})
