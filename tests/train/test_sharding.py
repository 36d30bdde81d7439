"""A sharded policy trains like a whole one, and its checkpoints fit any number of ranks."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.common.artifacts import Layout
from tasks.common.params import ParamsError
from tasks.models.packing import layers_of
from tasks.models.policy import load_model
from tasks.models.sharding import shard
from tasks.models.weights import whole
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import resume
from tasks.train.checkpoint.tensors import SavedTensors, optimizer_tensors
from tasks.train.learner.learner import sharding_of
from tasks.train.learner.ranks import Ranks
from tasks.train.loop.loop import train
from tasks.train.loop.trainer import Trainer
from tasks.train.methods.advantage import probe
from tasks.train.settings import CheckpointSettings, LearnerSettings, TrainSettings
from tests.stages import run_in_workers, run_together
from tests.train.test_experience import CHANGES as EXPERIENCE
from tests.train.test_multi_turn import GENERATE
from tests.train.worlds import make_trainer, make_world, write_params

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]
COMPONENTS = {"recipe": "r", "seed": 0}
# the coefficient rises with every update of any rank
BONUS = {"method": "clip", "entropy": {"coefficient": 0.05, "target": 10.0, "step": 0.01}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "epochs": {
        "train": {
            "kl_coefficient": 0.1,
            "reference": {"reset_every": 2},
            "updates": {"epochs": 2, "minibatches": 1},
            "loss": BONUS,
        }
    },
    "adapters": {
        "train": {
            "lora": {"rank": 4, "alpha": 8.0, "modules": ["all-linear"], "base_bits": 32},
            "kl_coefficient": 0.1,
            "learning_rate": 0.01,
        }
    },
    "bfloat16": {"train": {"dtype": "bfloat16"}},
    "compiled": {"learner": {"compile": True, "activation_checkpointing": True}},
    # one rollout per micro-batch and small chunks of logits; in some steps fewer groups are mixed
    # than there are ranks
    "uneven": {
        "learner": {
            "max_tokens_per_micro_batch": 1,
            "tokens_per_logprob_chunk": 3,
            "activation_checkpointing": True,
            "share_prompts": False,
        }
    },
    # a pass over the step's rollouts, supervised steps first (one process takes three of five
    # completions), two updates per batch, the same random numbers on all ranks, and truncated
    # rollouts
    "observed": {
        "train": {
            "updates": {"epochs": 1, "minibatches": 2},
            "advantage": {**dataclasses.asdict(probe.EXAMPLE), "method": "value_probe"},
            "warm_start": {"data": "profile", "steps": 3, "batch_size": 5},
            "shape": [{"method": name} for name in ("novelty", "pruned_po", "nat")],
            "loss": {"method": "clip", "normalize": "prompt"},
        }
    },
    # copies of each rank's rows
    "replayed": {
        "train": {
            "max_staleness": 1,
            "replay": {"method": "recent", "share": 0.3, "capacity": 4},
            "correction": {"proximal": {"method": "snapshot"}},
        }
    },
    # conversations, whose masks ranks exchange, and a branch that ends with a restored trunk
    "turns": {"train": {"branches": [0.1], "decay_share": 0.5, "generate": GENERATE}},
    # all ranks end the epochs at the same update
    "gated": {
        "train": {
            "updates": {"epochs": 3, "minibatches": 2},
            "loss": {"method": "dgg", "limit": 0.2, "window": 4},
        }
    },
    "joined": {"train": {**EXPERIENCE, "learning_rate": 1e-3}},
}


PARTS = {"plain": [8], "compiled": [2], "replayed": [3, 5], "gated": [6], "joined": [6]}
"""The numbers of steps at which a run stops and resumes; 4 for other cases."""
EQUAL = (
    *("reward_mean", "num_rollouts", "num_replayed", "num_mixed_groups", "num_updates"),
    *("tokens", "flops_charged", "clip_rate"),
)
HAS_EFFECT: dict[str, Callable[[list[dict[str, Any]]], bool]] = {
    "uneven": lambda steps: any(row["num_mixed_groups"] == 1 for row in steps),
    "gated": lambda steps: len({row["num_updates"] for row in steps}) > 1,
    "joined": lambda steps: sum(row["num_replayed"] for row in steps) > 1,
}


def world(root: Path, policy: Path, case: dict[str, Any], shard: str) -> Layout:
    """Make a world to train in, with the case's changes to its parameters."""
    layout = make_world(root, policy, SIZES * 6)
    write_params(layout, **{**case, "learner": {**case.get("learner", {}), "shard": shard}})
    return layout


def tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all tensors that training changes, each whole."""
    tensors = optimizer_tensors(trainer.learner.model, trainer.learner.optimizer)
    return {name: whole(tensor).clone().contiguous() for name, tensor in tensors.items()}


def work(
    rank: int,
    size: int,
    layout: Layout,
    max_steps: int,
    out: Path,
    prepare: Callable[[Trainer], object],
) -> None:
    """Train as one of `size` ranks from the newest checkpoint to `max_steps`. The first rank writes
    its rollouts, and all tensors after the resume and at the end."""
    torch.set_num_threads(1)
    if size:
        method = f"file://{out}/meeting"
        distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        # traced only: a machine may have no C++ compiler
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        patch.setenv("CC", "ls")
        trainer = make_trainer(layout, ranks=Ranks(rank, max(size, 1)), max_steps=max_steps)
    prepare(trainer)
    checkpoints = Checkpoints(layout.checkpoints, COMPONENTS, keep=1)
    with closing(trainer.collector.grader):
        resume(trainer, checkpoints, None)
        before = tensors_of(trainer)
        train(trainer, checkpoints, CheckpointSettings(0.0, 1), lambda *_: None)
    after, model = tensors_of(trainer), trainer.learner.whole_model()
    if rank == 0:
        assert model is not None
        save_file(before, out / "before.safetensors")
        save_file(after, out / "after.safetensors")
        save_file({k: v.contiguous().clone() for k, v in model.state_dict().items()}, out / "model")
        (out / "steps.json").write_text(json.dumps(trainer.state.steps))
        ends = [point["branch"] for point in trainer.state.curve if point["branch"]]
        (out / "branches.json").write_text(json.dumps(ends))
    if size:
        distributed.destroy_process_group()


def make_no_change(trainer: Trainer) -> None:
    """Leave the trainer as it is."""


def check_compiled(trainer: Trainer) -> None:
    layers = layers_of(trainer.learner.model)
    assert layers
    assert all("forward" in vars(layer) for layer in layers)


def run(
    layout: Layout,
    size: int,
    max_steps: int,
    out: Path,
    prepare: Callable[[Trainer], object] = make_no_change,
) -> Path:
    """Train with `size` ranks; 0 is a single process with the whole policy."""
    out.mkdir()
    arguments = (size, layout, max_steps, out, prepare)
    run_in_workers(work, [(rank, *arguments) for rank in range(max(size, 1))])
    return out


def same_tensors(one: Path, other: Path, tolerance: float = 0.0) -> bool:
    first, second = load_file(one), load_file(other)
    assert set(first) == set(second)
    return all(torch.allclose(first[n], second[n], atol=tolerance, rtol=0.0) for n in first)


@pytest.fixture(scope="module")
def untied(guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied") / "policy"
    shutil.copytree(guesser, folder)
    model = load_model(guesser, dtype=torch.float32, device=torch.device("cpu"))
    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    other.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_shards_take_the_steps_of_one_process(
    case: str, guesser: Path, untied: Path, tmp_path: Path
) -> None:
    policy = untied if case in ("epochs", "adapters") else guesser
    layouts = [world(tmp_path / shard, policy, CASES[case], shard) for shard in ("none", "fsdp2")]
    prepare = check_compiled if case == "compiled" else make_no_change
    if case == "compiled":
        run(layouts[0], 0, 1, tmp_path / "compiled", check_compiled)
        layouts[0] = world(tmp_path / "eager", policy, {}, "none")
    for num_steps in PARTS.get(case, [4]):
        one = run(layouts[0], 0, num_steps, tmp_path / f"one-{num_steps}")
        two = run(layouts[1], 2, num_steps, tmp_path / f"two-{num_steps}", prepare)
    steps = [steps_of(out) for out in (one, two)]
    assert len(steps[0]) == len(steps[1]) == num_steps
    # layers are gathered in bfloat16, whose norms autocast leaves in float32
    tolerance = 5e-3 if case == "bfloat16" else 1e-4
    for mine, theirs in zip(*steps, strict=True):
        for name in EQUAL:
            assert mine[name] == theirs[name], name
        for name in ("loss", "grad_norm", "entropy", "kl"):
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance), name
    ends = [json.loads((out / "branches.json").read_text()) for out in (one, two)]
    assert ends[0] == ends[1] == CASES[case].get("train", {}).get("branches", [])
    assert HAS_EFFECT.get(case, bool)(steps[0])
    assert sampled(layouts[0]) == sampled(layouts[1])
    assert same_tensors(one / "model", two / "model", tolerance)
    changed = load_file(two / "before.safetensors"), load_file(two / "after.safetensors")
    assert any(not torch.equal(before, changed[1][name]) for name, before in changed[0].items())


def test_two_replicas_of_two_shards_take_the_steps_of_one_process(
    guesser: Path, tmp_path: Path
) -> None:
    """Four ranks and one process both resume from their checkpoint."""
    layouts = [world(tmp_path / "none", guesser, {}, "none")]
    layouts.append(world(tmp_path / "fsdp2", guesser, {"learner": {"replicas": 2}}, "fsdp2"))
    one, first = run(layouts[0], 0, 4, tmp_path / "one"), run(layouts[1], 4, 2, tmp_path / "first")
    (newest,) = Checkpoints(layouts[1].checkpoints, COMPONENTS, keep=1).steps()
    files = sorted(path.name for path in newest.glob("tensors-*"))
    assert files == [f"tensors-0000{number}-of-00002.safetensors" for number in range(2)]
    alone = run(copied(layouts[1], tmp_path / "copy", "none", replicas=1), 0, 2, tmp_path / "alone")
    assert same_tensors(alone / "before.safetensors", first / "after.safetensors")
    four = run(layouts[1], 4, 4, tmp_path / "four")
    assert same_tensors(four / "before.safetensors", first / "after.safetensors")
    assert sampled(layouts[0]) == sampled(layouts[1])
    assert same_tensors(one / "model", four / "model", 1e-4)
    norms = [[row["grad_norm"] for row in steps_of(out)] for out in (one, four)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-4)
    assert max(norms[0]) > 0


def test_replicas_that_do_not_fit_are_refused() -> None:
    memory = LearnerSettings(shard="fsdp2", replicas=2)
    with pytest.raises(ParamsError, match="learner.replicas is 2, and 3 processes train"):
        sharding_of(TrainSettings(), memory, Ranks(0, 3), torch.device("cpu"))
    with pytest.raises(ParamsError, match="learner.replicas is 2, and learner.shard is none"):
        LearnerSettings(replicas=2)


@pytest.fixture(scope="module")
def stopped(guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, Path]:
    """Return a run of two ranks that stopped after three steps, and its outputs."""
    root = tmp_path_factory.mktemp("stopped")
    layout = world(root / "world", guesser, {}, "fsdp2")
    return layout, run(layout, 2, 3, root / "out")


@pytest.mark.parametrize("size", [0, 3])
def test_a_checkpoint_of_two_ranks_fits_any_number(
    size: int, stopped: tuple[Layout, Path], tmp_path: Path
) -> None:
    layout, out = stopped
    copy = copied(layout, tmp_path / "world", "fsdp2" if size else "none")
    found = run(copy, size, 3, tmp_path / "out")
    assert same_tensors(found / "before.safetensors", out / "after.safetensors")


def test_a_whole_checkpoint_fits_shards(guesser: Path, tmp_path: Path) -> None:
    layout = world(tmp_path / "world", guesser, {}, "none")
    out = run(layout, 0, 3, tmp_path / "one")
    found = run(copied(layout, tmp_path / "copy", "fsdp2"), 3, 3, tmp_path / "three")
    assert same_tensors(found / "before.safetensors", out / "after.safetensors")


def test_rows_are_read_from_uneven_shards(tmp_path: Path) -> None:
    tensor = torch.arange(14.0).reshape(7, 2)
    parts = [tensor[:3], tensor[3:6], tensor[6:], tensor[7:]]
    files = [tmp_path / f"{number}.safetensors" for number in range(len(parts))]
    for path, part in zip(files, parts, strict=True):
        save_file({"w": part.clone()}, path)
    saved = SavedTensors(files)
    assert torch.equal(saved["w"], tensor)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(saved.rows("w", slice(start, stop)), tensor[start:stop])


def rollouts_of(layout: Layout) -> pl.DataFrame:
    """Return all rollouts in the checkpoints of a run."""
    parts = sorted(layout.checkpoints.glob("*/rollouts-*.parquet"))
    return pl.concat([pl.read_parquet(part) for part in parts])


def sampled(layout: Layout) -> list[Any]:
    return rollouts_of(layout).select("step", "group", "token_ids").rows()


def copied(layout: Layout, root: Path, shard: str, **learner: Any) -> Layout:
    """Copy a world with its checkpoints, to resume it."""
    shutil.copytree(layout.root, root)
    copy = Layout(root)
    write_params(copy, learner={"shard": shard, **learner})
    return copy


def steps_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "steps.json").read_text())
    return rows


def load_rows(rank: int, folder: Path, out: Path) -> None:
    """Load the rows of one of two ranks; write the growth of its memory, and the whole tensors."""
    torch.set_num_threads(1)
    method = f"file://{out}/meeting"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    before, cpu = memory_kb("VmRSS"), torch.device("cpu")
    by_rows = partial(shard, device=cpu, dtype=torch.float32, forwards=())
    model = load_model(folder, dtype=torch.float32, device=cpu, shard=by_rows)
    (out / f"{rank}.kb").write_text(str(memory_kb("VmHWM") - before))
    tensors = {name: whole(tensor) for name, tensor in model.named_parameters()}
    if rank == 0:
        save_file(tensors, out / "tensors")
    distributed.destroy_process_group()


def memory_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_a_rank_reads_only_its_rows(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=12
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "policy", max_shard_size="60MB")
    whole_kb = sum(parameter.nbytes for parameter in model.parameters()) / 1024
    run_together(load_rows, [(rank, tmp_path / "policy", tmp_path) for rank in (0, 1)])
    loaded = load_file(tmp_path / "tensors")
    assert all(torch.equal(loaded[name], value) for name, value in model.named_parameters())
    # the rows, their pages of the mapped files, and the tensor in progress
    for rank in (0, 1):
        assert int((tmp_path / f"{rank}.kb").read_text()) < 0.9 * 2 * whole_kb


def test_two_resumed_ranks_take_the_steps_of_an_uninterrupted_run(
    stopped: tuple[Layout, Path], guesser: Path, tmp_path: Path
) -> None:
    resumed = run(copied(stopped[0], tmp_path / "copy", "fsdp2"), 2, 6, tmp_path / "resumed")
    whole_run = run(world(tmp_path / "world", guesser, {}, "fsdp2"), 2, 6, tmp_path / "whole")
    assert same_tensors(resumed / "after.safetensors", whole_run / "after.safetensors")
    assert steps_of(resumed) == steps_of(whole_run)


def test_a_checkpoint_without_the_file_of_a_rank_is_skipped(
    stopped: tuple[Layout, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = copied(stopped[0], tmp_path / "world", "fsdp2")
    checkpoints = Checkpoints(layout.checkpoints, COMPONENTS, keep=1)
    (newest,) = checkpoints.steps()
    (newest / "tensors-00001-of-00002.safetensors").unlink()
    assert checkpoints.load() is None
    assert "skipping the damaged checkpoint" in caplog.text
