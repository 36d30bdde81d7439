"""Several processes: the files of the first one, the sum of gradients in buckets, and the
distribution of rollouts."""

import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import write_results
from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.learner.balance import rank_of
from tasks.train.learner.ranks import Ranks, buckets
from tasks.train.learner.update import UpdateStats
from tests.stages import run_in_workers
from tests.train.worlds import make_trainer, make_world, run_in_process, sampled


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_writes_results(rank: int, guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 9)
    trainer = run_in_process(layout, {"max_steps": 1})
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    trainer.run = replace(trainer.run, ranks=Ranks(rank, 2))
    write_results(trainer, checkpoints, tmp_path / "out")
    assert (tmp_path / "out").exists() == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_keeps_rows_of_rollouts(
    rank: int, guesser: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, [4, 4, 4]))
    with closing(trainer.collector.grader):
        batch = sampled(trainer)
        trainer.run = replace(trainer.run, ranks=Ranks(rank, 2))
        rollouts = trainer.estimate(batch.fresh, trainer.rng())
        trainer.add_row(batch, rollouts, UpdateStats(), 0.0)
    assert sum(map(len, trainer.state.rollouts)) == (4 if rank == 0 else 0)
    assert len(trainer.state.steps) == 1


def test_buckets_by_hand() -> None:
    single, double = torch.float32, torch.float64
    shapes = [(2, single), (3, double), (2, single), (1, single), (9, single), (1, double)]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in shapes]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    found = [[places[id(tensor)] for tensor in bucket] for bucket in buckets(tensors, 16)]
    assert found == [[0, 2], [1], [3], [4], [5]]
    assert buckets([], 16) == []


def sum_gradients(rank: int, folder: Path, bucket_bytes: int) -> None:
    """Write the gradients of one of two processes after the sum."""
    torch.set_num_threads(1)
    method = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    model = gradients_of(rank)
    Ranks(rank, 2).all_reduce_gradients(model, bucket_bytes)
    torch.save([parameter.grad for parameter in model.parameters()], folder / f"{rank}.pt")
    distributed.destroy_process_group()


def gradients_of(rank: int) -> torch.nn.Module:
    """Return a model with gradients of one rank; one parameter has none on rank 1, one is
    transposed in memory."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 4) for _ in range(4)]).double()
    model[3].float()
    generator = torch.Generator().manual_seed(rank)
    for number, parameter in enumerate(model.parameters()):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if number == 2:
            values = values.t().contiguous().t()
        if not (rank == 1 and number == 5):
            parameter.grad = values.to(parameter.dtype)
    return model


@pytest.mark.parametrize("bucket_bytes", [1, 150, 10**6])
def test_the_sum_over_ranks_does_not_depend_on_the_buckets(
    bucket_bytes: int, tmp_path: Path
) -> None:
    run_in_workers(sum_gradients, [(rank, tmp_path, bucket_bytes) for rank in (0, 1)])
    expected = [
        sum(g for g in pair if g is not None)
        for pair in zip(
            *([p.grad for p in gradients_of(rank).parameters()] for rank in (0, 1)), strict=True
        )
    ]
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def arrive_late(rank: int, meeting: str) -> None:
    """Let the first rank arrive after the timeout of a collective."""
    limit = timedelta(seconds=2)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit
    )
    ranks = Ranks(rank, 2, timeout=limit)
    if rank == 0:
        time.sleep(5)
    ranks.wait_for_main()
    assert ranks.all_gather(rank) == [0, 1]
    distributed.destroy_process_group()


def test_ranks_wait_for_the_first_beyond_the_timeout_of_a_collective(tmp_path: Path) -> None:
    run_in_workers(arrive_late, [(rank, f"file://{tmp_path}/meeting") for rank in range(2)])


# --- the same number of tokens for every rank


def rollouts_of(prompts: list[int], lengths: list[list[int]]) -> Rollouts:
    """Return groups with prompts and completions of these lengths."""
    group_B = np.repeat(np.arange(len(prompts)), [len(group) for group in lengths])
    completions = [[1] * length for group in lengths for length in group]
    rows_Q = np.arange(len(prompts))
    return make_rollouts(rows_Q, [[1] * n for n in prompts], group_B, token_ids=completions)


def loads(rollouts: Rollouts, rank_B: Ints, num_ranks: int) -> list[int]:
    """Return the tokens that each rank computes; a group's prompt counts once."""
    found = []
    for rank in range(num_ranks):
        rows = np.flatnonzero(rank_B == rank)
        _, firsts = np.unique(rollouts.group_B[rows], return_index=True)
        prompts = rollouts.prompt_tokens_B()[rows[firsts]].sum()
        found.append(int(prompts + rollouts.completion_tokens_B()[rows].sum()))
    return found


def tokens_by_rank(rollouts: Rollouts, num_ranks: int) -> list[int]:
    rows = np.arange(len(rollouts.group_B))
    return loads(rollouts, rank_of(rollouts, rows, num_ranks, shares=True), num_ranks)


def test_a_group_is_not_split_if_that_lightens_no_rank() -> None:
    prompts = rollouts_of([500, 3, 3], [[2, 2, 2], [2], [2]])
    rows = np.arange(5)
    assert len(set(rank_of(prompts, rows, 2, shares=True)[:3])) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=9)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 9),
)
def test_no_rank_has_more_than_twice_the_optimum(
    groups: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    prompts, lengths = [prompt for prompt, _ in groups], [group for _, group in groups]
    rollouts = rollouts_of(prompts, lengths)
    tokens = tokens_by_rank(rollouts, num_ranks)
    total = sum(prompts) + sum(map(sum, lengths))
    largest = max(prompt + max(group) for prompt, group in groups)
    assert sum(tokens) >= total
    assert max(tokens) <= 2.01 * max(total / num_ranks, largest)


@pytest.mark.parametrize("num_ranks", [8, 32, 64])
def test_64_groups_of_16_are_within_5_percent_of_the_mean(num_ranks: int) -> None:
    """Some prompts have longer completions than others."""
    rng = np.random.default_rng(0)
    scale = rng.normal(4.5, 0.6, (64, 1)) + rng.normal(2.0, 0.5, (64, 16))
    completions = np.maximum(np.exp(scale), 1).astype(np.int64)
    tokens = tokens_by_rank(rollouts_of([80] * 64, completions.tolist()), num_ranks)
    by_turns = completions.reshape(-1, num_ranks, 16).sum((0, 2)) + 80 * 64 // num_ranks
    assert max(tokens) <= 1.05 * np.mean(tokens)
    assert max(tokens) < by_turns.max()
