"""Several processes: what only the first keeps, and gradients that are summed in buckets."""

import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.learner.ranks import Ranks, buckets
from tasks.train.learner.update import UpdateStats
from tasks.train.loop.save import write_results
from tests.stages import FORKS
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
        trainer.record(batch, rollouts, UpdateStats(), 0.0)
    assert sum(map(len, trainer.state.rollouts)) == (4 if rank == 0 else 0)
    assert len(trainer.state.steps) == 1


def test_buckets_by_hand() -> None:
    single, double = torch.float32, torch.float64
    shapes = [(2, single), (3, double), (2, single), (1, single), (9, single), (1, double)]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in shapes]
    assert by_identity(tensors, 16) == [[0, 2], [1], [3], [4], [5]]
    assert buckets([], 16) == []


def by_identity(tensors: list[torch.Tensor], max_bytes: int) -> list[list[int]]:
    """The places in `tensors` of each bucket's tensors."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return [[places[id(t)] for t in bucket] for bucket in buckets(tensors, max_bytes)]


def sum_gradients(rank: int, folder: Path, bucket_bytes: int) -> None:
    """One of two processes: the gradients after the sum, in a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    model = gradients_of(rank)
    Ranks(rank, 2).all_reduce_gradients(model, bucket_bytes)
    torch.save([parameter.grad for parameter in model.parameters()], folder / f"{rank}.pt")
    distributed.destroy_process_group()


def gradients_of(rank: int) -> torch.nn.Module:
    """A model whose gradients are a rank's own; one parameter has none on rank 1, one is
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
def test_gradients_are_summed_over_ranks_whatever_the_buckets(
    bucket_bytes: int, tmp_path: Path
) -> None:
    arguments = [(rank, tmp_path, bucket_bytes) for rank in (0, 1)]
    processes = [FORKS.Process(target=sum_gradients, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    expected = [
        sum(g for g in pair if g is not None)
        for pair in zip(
            *([p.grad for p in gradients_of(rank).parameters()] for rank in (0, 1)), strict=True
        )
    ]
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def come_late(rank: int, meeting: str) -> None:
    """The first rank comes long after what a collective may take."""
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


def test_a_rank_waits_for_the_first_however_long_that_waits_for_a_gpu(tmp_path: Path) -> None:
    arguments = [(rank, f"file://{tmp_path}/meeting") for rank in range(2)]
    ranks = [FORKS.Process(target=come_late, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
