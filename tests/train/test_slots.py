"""One contract test a slot, over every file found in it."""

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
from tasks.train.loading import load_method
from tasks.train.methods import advantage, control, generate, loss, replay, select, shape
from tasks.train.profile import Profile
from tasks.train.rollouts import (
    Floats,
    Ints,
    Observed,
    Prompts,
    Rollouts,
    StepTotals,
    merge,
    nested,
)
from tasks.train.settings import BatchSettings
from tasks.train.slots import Advantage, Control, Replay, SoFar, fill_state, values_of
from tasks.train.tokens import Tokens
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
    """A method as params.yaml names it, with the settings for this test."""
    module = registry.load(package, name, "method")
    if not hasattr(module, "Settings"):
        return {"method": name}
    settings = module.EXAMPLE if hasattr(module, "EXAMPLE") else module.Settings()
    return {"method": name, **asdict(settings)}


def make(package: ModuleType, name: str, *arguments: Any, profile: Profile | None = None) -> Any:
    spec, prompts = example(package, name), prompts_of(1000)
    slot = package.__name__.rpartition(".")[2]
    return load_method(slot, spec, *arguments, prompts=prompts, profile=profile)


def comes_back(method: Any) -> None:
    """What a checkpoint keeps of a method is all that it remembers."""
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
    comes_back(choose)


def solved_half() -> Profile:
    """A profile of the prompts, each with a correct and a wrong sample."""
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
        assert (advantages[GROUPS == 1] == 0).all()  # equal rewards teach nothing
        assert (advantages[GROUPS == 2] == 0).all()  # nor does a group of one
    else:
        assert (advantages[GROUPS == 2] != 0).all()
    assert advantages[0] >= 0 >= advantages[1]
    assert advantages[0] > advantages[1]
    gap = [0, 0, 0, 2, 2, 5, 9, 9]  # groups that select emptied leave gaps
    np.testing.assert_allclose(estimate(observed_of(rollouts_of(REWARDS, gap))), advantages)
    assert estimate(observed_of(rollouts_of([], []))).shape == (0,)
    comes_back(estimate)


@pytest.mark.parametrize("name", names(advantage))
def test_an_advantage_does_not_depend_on_the_order_of_groups_nor_on_a_restart(name: str) -> None:
    estimate: Advantage = make(advantage, name, profile=solved_half())
    lengths = [3, 1, 4, 2, 2, 5, 1, 3]
    steps = [observed_of(rollouts_of(REWARDS, GROUPS, lengths), seed) for seed in range(3)]
    for rollouts in steps[:2]:  # some learn from a step
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


@pytest.mark.parametrize("name", names(shape))
def test_shape(name: str) -> None:
    """A group is shaped by itself, and its rows' order does not matter unless a coin decides."""
    change, lengths = make(shape, name), [3, 1, 4, 2, 2, 5, 1, 3]
    rollouts = rollouts_of(REWARDS, GROUPS, lengths)
    logprobs = nested(-np.random.default_rng(1).exponential(size=sum(lengths)), np.array(lengths))
    rollouts = observed_of(rollouts.with_columns(logprobs=logprobs))
    rollouts = rollouts.with_columns(reason=["stop"] * 5 + ["length"] * 3)
    given_B = np.array([1.5, -0.5, -1.0, 0.2, 0.3, -0.4, 2.0, -1.0])
    for _ in range(2):  # some remember earlier steps
        change.observe(rollouts)
    comes_back(change)
    rewards, given = change.rewards(rollouts, 6), given_B[rollouts.owner_N()]
    assert rewards.shape == REWARDS.shape

    def shaped(seed: int) -> Floats:
        found: Floats = change.advantages(rollouts, given, np.random.default_rng(seed))
        return found

    advantages = shaped(0)
    assert (advantages == shaped(0)).all()
    assert advantages.shape == given.shape
    assert np.isfinite([*rewards, *advantages]).all()
    assert (rewards != REWARDS).any() or (advantages != given).any()  # it changes something
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
    """Random tokens of the rollouts `rows`; rollout i has `lengths[i]` of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((5, sum(lengths)), generator=generator, dtype=torch.float64)
    values[2] = values[2].exp()
    owners = np.repeat(np.arange(len(lengths)), lengths)
    mine = np.flatnonzero(np.isin(owners, rows))
    row_N = torch.from_numpy(np.searchsorted(rows, owners[mine]))
    last_N = values[4, mine]
    tokens = Tokens(*values[:4, mine], row_N, len(rows), last_N, last_N > 0)
    return replace(tokens, sampler_logprobs_N=last_N)


@pytest.mark.parametrize("name", names(loss))
def test_loss_adds_up_over_micro_batches(name: str) -> None:
    compute, totals = make(loss, name), StepTotals(28, 8, 9)
    lengths = [1, 2, 3, 4, 5, 6, 1, 6]
    whole, stats = compute(tokens_of(lengths, list(range(8))), totals)
    parts = [compute(tokens_of(lengths, list(range(i, 8, 3))), totals) for i in range(3)]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item())
    assert sum(float(s["clipped"]) for _, s in parts) == float(stats["clipped"])
    comes_back(compute)


VISITS = [(0, 4), (0, 4), (0, 3), (1, 2), (1, 2), (2, 8)]


def solved(row: int) -> float:
    """Some prompts are solved always, the others never."""
    return float(row % 2)


@pytest.mark.parametrize("name", names(control))
def test_a_step_of_control_does_not_grow_with_the_plan(name: str) -> None:
    """Neither what a step looks at, nor what a checkpoint keeps."""
    plan = passes_of(1000, 4, 200)
    phases = np.zeros(len(plan), dtype=np.int64)  # all of it one phase
    method: Control = make(control, name, replace(plan, phases_V=phases))
    rng = np.random.default_rng(0)
    method.next(START, rng)
    method.progress()  # sums over the plan are made once
    tracemalloc.start()
    request = method.next(START, rng)
    method.progress()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert request is not None
    assert peak < 100_000  # a column of the plan has 1,600,000 bytes
    assert (
        sum(array.size for array in values_of(method.state).values()) < 20_000
    )  # numbers a prompt, none a visit: there are 200,000


@pytest.mark.parametrize("name", names(control))
def test_control(name: str) -> None:
    method: Control = make(control, name, plan_of(VISITS))
    sampled, progress = [], [method.progress()]
    while step := play(method, np.random.default_rng(0), solved):
        _, rollouts = step
        method.observe(rollouts)
        sampled += rollouts.prompt_rows_Q.tolist()
        progress.append(method.progress())
        assert all(isinstance(value, float) for value in method.describe().values())
        comes_back(method)
    assert sampled
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("name", names(control))
def test_a_control_goes_on_beyond_the_plan_until_the_budget_is_spent(name: str) -> None:
    """And asks for no more than the budget leaves, but for a group."""
    plan = plan_of(VISITS)
    method: Control = make(control, name, plan)
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
def test_a_control_goes_on_as_if_it_had_not_been_interrupted(name: str) -> None:
    def rest(method: Control, first: int) -> list[Any]:
        requests = []
        for step in range(first, 9):
            if not (found := play(method, np.random.default_rng(step), solved)):
                break
            requests += [(r.prompt_rows.tolist(), r.counts.tolist()) for r in found[0]]
            method.observe(found[1])
        return requests

    whole: Control = make(control, name, plan_of(VISITS * 2))
    found = play(whole, np.random.default_rng(0), solved)
    assert found
    whole.observe(found[1])
    resumed: Control = make(control, name, plan_of(VISITS * 2))
    fill_state(resumed.state, values_of(whole.state))
    assert rest(resumed, 1) == rest(whole, 1)


@pytest.mark.parametrize("name", names(control))
def test_a_control_bears_a_step_that_could_not_be_graded(name: str) -> None:
    method: Control = make(control, name, plan_of(VISITS))
    request = method.next(START, np.random.default_rng(0))
    assert request
    rollouts = answer_to(request, errors=int(request.counts.sum()))
    method.next(after(rollouts), np.random.default_rng(1))
    method.observe(rollouts)
    assert np.isfinite(list(method.describe().values())).all()


def unasked(rollouts: Rollouts) -> Observed:
    raise AssertionError("there is nothing to score")


@pytest.mark.parametrize("name", names(replay))
def test_replay(name: str) -> None:
    profile = Profile(SAMPLES.frame([]), Prompts(PROMPTS.frame([]), lambda rows: []))
    method: Replay = make(replay, name, profile=profile)
    batch = BatchSettings("rollouts", 8, "generated")
    assert method.room(batch) == 0  # an empty buffer gives nothing
    assert method.draw(np.random.default_rng(0), 0, batch) is None
    method.prepare(unasked)
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
    comes_back(method)


class CountingEngine:
    """Completions that are their own seed; it can be scheduled, as the protocol asks."""

    name, version, prefix_block, prefilled_tokens = "hf", "1", 1, 0
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
        """Nothing is held."""

    def cache_bytes(self, positions: int) -> int:
        return 1000 * positions

    def generate_in_order(self, request: Request, order_B: Ints, max_rows: int) -> Samples:
        assert sorted(order_B) == list(range(len(request.seeds)))
        return self.generate(request)


@pytest.mark.parametrize("name", names(generate))
def test_generate_samples_every_rollout_it_is_asked_for(name: str) -> None:
    method = make(generate, name, 9)
    seeds = [11, 12, 13, 14, 15]
    request = Request([[1], [2]], [3, 2], seeds, Sampling(1.0, 1.0, 0, 4, 0))
    asked = asked_of(np.array([7, 8]), ["7", "8"])
    others = replace(asked, prompt_rows=None)  # prompts of validation
    first, second = (method.generate(CountingEngine(), request, asked) for _ in range(2))
    assert sorted(ids[0] for ids in first.token_ids) == seeds
    assert first == second
    method.observe(rollouts_of([0.0] * 5, [0, 0, 0, 1, 1], prompt_rows=[7, 8]))
    comes_back(method)
    assert method.generate(CountingEngine(), request, asked) == first
    assert method.generate(CountingEngine(), request, others) == first


def test_an_unknown_method_or_setting_is_named() -> None:
    known = rf"train\.select\.method is 'pod'; use: {', '.join(names(select))}"
    with pytest.raises(ParamsError, match=known):
        load_method("select", {"method": "pod"})
    with pytest.raises(ParamsError, match=r"train\.select \(pods\)\.keep is missing"):
        load_method("select", {"method": "pods"})
    with pytest.raises(ParamsError, match=r"train\.select \(all\)\.keep is unknown"):
        load_method("select", {"method": "all", "keep": 2})
    with pytest.raises(ParamsError, match=r"train\.loss\.method is missing"):
        load_method("loss", {})
