"""The speed of sampling and of updates on this machine, in executed FLOPs per second.

Every forward pass also takes a fixed time per layer, which dominates for small policies. It counts
as FLOPs: CALL and UPDATE, from runs of policies of 0.4 and 23 million parameters on a CPU.

A speed is measured, if earlier runs of this data root recorded it: the FLOPs in `flops.json`
divided by the seconds in `measured/`. Otherwise it is a share of the speed of a matrix product on
this CPU (`probe`), or of a GPU's peak (`table`)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from flows.doctor.ranges import Range, around
from tasks.common.accounting.device_time import A100, H100, H200
from tasks.common.accounting.ledger import Architecture
from tasks.common.checksums import read_checked, read_note_of
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout

SAMPLING_SHARE = 0.05  # of a GPU's peak; decoding is memory-bound, so this varies widely
TRAINING_SHARE = 0.25
GPU_FACTOR = 4.0
OTHER_GPU_FLOPS = 100e12
CPU_SAMPLING = Range(0.2, 0.4, 0.8)  # of a matrix product's speed
CPU_TRAINING = Range(0.45, 0.9, 1.8)
CALL = 1.4e7  # FLOPs of a CPU in the fixed time of a layer's forward pass
UPDATE = 6.0e8  # in that of a layer's update
LONGEST = 3.0  # length of the longest completion of a batch, relative to the mean
PROBE_SIZE = 512
PROBE_SECONDS = 0.5
MEASURED_FACTOR = 1.3  # uncertainty in both directions: load, lengths and batches vary between runs
SAME_SIZE = 2.0  # maximum ratio of sizes at which a rate is used
Values = Mapping[str, Any]
OF = {"profile": "profile.parquet", "train": "curve.parquet"}  # their digests identify a run
STAGE_SECONDS = Range(2.0, 10.0, 60.0)
"""The fixed time of a stage for its start, files and record."""


@dataclass(frozen=True)
class Rates:
    """FLOPs per second of sampling from a fixed policy, of sampling in training and of updates, and
    a description of their source."""

    sampling: Range
    rollouts: Range
    updates: Range
    source: str


def rates(
    values: Values, layout: Layout, policy: Architecture, prompt: float, gpu: str | None, gpus: Any
) -> Rates:
    """Return the rates of all GPUs together, for prompts of `prompt` tokens. `gpu` is a name, None
    for a CPU; `gpus` are the numbers that sample and that train."""
    sampling, updates, source = table(gpu, *gpus) if gpu else of_cpu(values)
    sampled, rollouts, updated = list[float](), list[float](), list[float]()
    batch = values["train"]["batch"]
    size = batch["size"] * (8.0 if batch["unit"] == "prompts" else 1.0)  # of a usual group
    for flops, seconds, phase in measured(layout, float(policy.num_matmul_parameters)):
        num, executed = flops["rollouts"][phase], flops["executed"]
        per_call = size if phase == "generate" else values["store"]["batch_rollouts"]
        completion = max(flops["tokens"][phase] / num - prompt, 1.0)
        fixed = policy.num_layers * CALL * num_calls(values, num, completion, per_call)
        rate = (executed[phase] + (0.0 if gpu else fixed)) / seconds[phase]
        (rollouts if phase == "generate" else sampled).append(rate)
        if phase == "generate" and executed["update"] > 0:
            fixed = 0.0 if gpu else policy.num_layers * UPDATE * num / size
            done = executed["update"] + executed["score"] + fixed
            updated.append(done / (seconds["update"] + seconds["score"]))
    known = "measured by the profile here" if sampled else ""
    known = f"measured in {len(rollouts)} trainings here" if rollouts else known
    source = f"sampling {known}; updates {source}" if known and not updated else known or source
    return Rates(
        spread(sampled or rollouts, sampling),
        spread(rollouts or sampled, sampling),
        spread(updated, updates),
        source,
    )


def table(gpu: str, sampling_gpus: int, training_gpus: int) -> tuple[Range, Range, str]:
    known = [device.flops for device in (A100, H100, H200) if device.name in gpu]
    flops = around(known[0] if known else OTHER_GPU_FLOPS, GPU_FACTOR)
    sampling, training = SAMPLING_SHARE * max(sampling_gpus, 1), TRAINING_SHARE * training_gpus
    return flops * sampling, flops * training, f"assumed for {gpu} (flows/doctor/rates.py)"


def of_cpu(values: Values) -> tuple[Range, Range, str]:
    threads, dtype = values["engine"]["threads"], values["engine"]["dtype"]
    speed = probe(threads, dtype)
    updates = CPU_TRAINING * probe(threads, values["train"]["dtype"])
    return CPU_SAMPLING * speed, updates, f"from a matrix product, {speed / 1e9:.3g} GFLOP/s here"


@cache
def probe(threads: int, dtype: str) -> float:
    """Return the FLOPs per second of a matrix product on this CPU under its present load."""
    import torch  # takes two seconds

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    factor = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=getattr(torch, dtype))
    factor @ factor  # the first takes longer
    started, num = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < PROBE_SECONDS:
        factor @ factor
        num += 1
    torch.set_num_threads(before)
    return float(num * 2 * PROBE_SIZE**3 / seconds)


def num_calls(values: Values, rollouts: float, completion: float, per_call: float) -> float:
    """Return the number of forward passes to sample rollouts of `completion` tokens, `per_call` at
    a time. A row that ends is replaced, until only the longest are left."""
    longest = min(LONGEST * completion, float(values["sampling"]["max_tokens"]))
    rows = max(min(float(values["engine"]["max_rows"]), per_call, rollouts), 1.0)
    tails = max(rollouts / per_call, min(rollouts, 1.0)) * max(longest - completion, 0.0)
    return rollouts * completion / rows + tails


def spread(speeds: list[float], assumed: Range) -> Range:
    """Return the range of measured rates around their median, widened by MEASURED_FACTOR."""
    if not speeds:
        return assumed
    middle = sorted(speeds)[len(speeds) // 2]
    return Range(min(speeds) / MEASURED_FACTOR, middle, max(speeds) * MEASURED_FACTOR)


def measured(
    layout: Layout, num_parameters: float
) -> Iterator[tuple[dict[str, Any], dict[str, float], str]]:
    """Yield FLOPs, seconds and the phase of sampling of the profile and of each training run of a
    policy of a similar size, if their files and their notes exist."""
    folders = sorted(layout.root.glob("runs/*/*/train"))
    cells = [(each, "-".join(each.parts[-3:-1]), "train", "generate") for each in folders]
    for folder, note, part, phase in [(layout.profile, "profile", "profile", "profile"), *cells]:
        with suppress(ArtifactError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            flops = read_checked(folder / "flops.json")
            cost = read_note_of(layout.measured(note), folder / OF[part])
            # 2 P for every sampled token
            size = flops["charged"][phase] / (2.0 * flops["tokens"][phase] * num_parameters)
            if 1.0 / SAME_SIZE <= size <= SAME_SIZE and cost["seconds"][phase] > 0:
                yield flops, cost["seconds"], phase
