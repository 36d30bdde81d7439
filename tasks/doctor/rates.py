"""The speed of sampling and training on this machine, in charged FLOPs per second.

It is measured, if earlier runs of this data root recorded it: the charge in `flops.json` divided by
the seconds in `measured/`. Otherwise it is assumed (`table`), with wide intervals, because the
table depends on neither model nor lengths."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.common.accounting.device_time import A100, H100, H200
from tasks.common.checksums import read_checked, read_note_of
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.doctor.ranges import Range, around

SAMPLING_SHARE = 0.05  # of a GPU's peak; decoding is memory-bound, so this varies widely
TRAINING_SHARE = 0.25
GPU_FACTOR = 4.0
OTHER_GPU_FLOPS = 100e12
CPU_FLOPS = Range(2e9, 2e10, 1e11)
MEASURED_FACTOR = 1.3  # uncertainty in both directions: load, lengths and batches vary between runs
SAME_SIZE = 2.0  # maximum ratio of sizes at which a rate is used
OF = {"profile": "profile.parquet", "train": "curve.parquet"}  # their digests identify a run
STAGE_SECONDS = Range(2.0, 10.0, 60.0)
"""The fixed time of a stage for its start, files and record."""


@dataclass(frozen=True)
class Rates:
    """Charged FLOPs per second, and a description of their source."""

    sampling: Range
    training: Range
    source: str


def rates(
    layout: Layout, num_parameters: float, gpu: str | None, sampling_gpus: int, training_gpus: int
) -> Rates:
    """Return the rates of all GPUs together, at this policy size. `gpu` is a name, None for CPU."""
    assumed = table(gpu)
    note = layout.measured("profile")
    sampling = list(measured(layout.profile, note, "profile", ("profile",), num_parameters))
    training = list(measured_training(layout, num_parameters))
    sources = []
    if sampling:
        sources.append("sampling: measured by the profile here")
    if training:
        sources.append(f"training: measured in {len(training)} runs here")
    if not sampling or not training:
        rest = "the rest: " if sources else ""
        sources.append(f"{rest}assumed for {gpu or 'a CPU'} (tasks/doctor/rates.py)")
    return Rates(
        spread(sampling) if sampling else assumed.sampling * max(sampling_gpus, 1),
        spread(training) if training else assumed.training * max(training_gpus, 1),
        "; ".join(sources),
    )


def table(gpu: str | None) -> Rates:
    if gpu is None:
        return Rates(CPU_FLOPS, CPU_FLOPS, "")
    known = [device for device in (A100, H100, H200) if device.name in gpu]
    flops = known[0].flops if known else OTHER_GPU_FLOPS
    sampling, training = SAMPLING_SHARE * flops, TRAINING_SHARE * flops
    return Rates(around(sampling, GPU_FACTOR), around(training, GPU_FACTOR), "")


def spread(found: list[float]) -> Range:
    """Return the range of measured rates around their median, widened by MEASURED_FACTOR."""
    middle = sorted(found)[len(found) // 2]
    return Range(min(found) / MEASURED_FACTOR, middle, max(found) * MEASURED_FACTOR)


def measured_training(layout: Layout, num_parameters: float) -> Iterator[float]:
    """Yield the rate (sampling, scoring and updates) of training runs of a similar policy."""
    for folder in sorted(layout.root.glob("runs/*/*/train")):
        note = layout.measured("-".join(folder.parts[-3:-1]))
        yield from measured(folder, note, "train", ("generate", "score", "update"), num_parameters)


def measured(
    folder: Path, note: Path, part: str, phases: tuple[str, ...], num_parameters: float
) -> Iterator[float]:
    """Yield the rate of the run in a folder, if its files and its note exist, and the policy has a
    similar size."""
    with suppress(ArtifactError, KeyError, TypeError, AttributeError):
        flops, cost = read_checked(folder / "flops.json"), read_note_of(note, folder / OF[part])
        charged = sum(flops["charged"][phase] for phase in phases)
        sampled = phases[0]
        # 2 P for every sampled token
        size = flops["charged"][sampled] / max(2.0 * flops["tokens"][sampled], 1.0)
        seconds = cost["seconds"][part]
        is_same = num_parameters / SAME_SIZE <= size <= num_parameters * SAME_SIZE
        if seconds > 0 and charged > 0 and is_same:
            yield charged / seconds
