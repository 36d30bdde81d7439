"""How fast this machine samples and trains, in charged FLOPs a second.

Measured, where earlier runs of this data root say it: what `flops.json` charges over what
`cost.json` took. Else from the table below, whose intervals are wide because it knows neither
model nor lengths."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.common.device_time import A100, H100, H200
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.sealed import read_sealed
from tasks.doctor.ranges import Range, around

SAMPLING_SHARE = 0.05  # of a GPU's peak, that decoding reaches; bound by memory, it varies widely
TRAINING_SHARE = 0.25
GPU_FACTOR = 4.0
OTHER_GPU_FLOPS = 100e12
CPU_FLOPS = Range(2e9, 2e10, 1e11)
MEASURED_FACTOR = 1.3  # on both sides: load, lengths and batches differ from run to run
SAME_SIZE = 2.0  # rates of a policy more than so many times larger or smaller are not used
STAGE_SECONDS = Range(2.0, 10.0, 60.0)
"""A stage's own start, files and record, whatever it computes."""


@dataclass(frozen=True)
class Rates:
    """FLOPs a second, and where the numbers are from, in words."""

    sampling: Range
    training: Range
    source: str


def rates(layout: Layout, num_parameters: float, gpu: str | None) -> Rates:
    """The rates for a policy of this size on this machine; `gpu` is the name of its GPU."""
    assumed = table(gpu)
    sampling = list(measured_sampling(layout, num_parameters))
    training = list(measured_training(layout, num_parameters))
    sources = []
    if sampling:
        sources.append("sampling: measured by the profile here")
    if training:
        sources.append(f"training: measured in {len(training)} runs here")
    if not sampling or not training:
        sources.append(f"the rest: assumed for {gpu or 'a CPU'} (tasks/doctor/rates.py)")
    return Rates(
        spread(sampling) if sampling else assumed.sampling,
        spread(training) if training else assumed.training,
        "; ".join(sources),
    )


def table(gpu: str | None) -> Rates:
    """What is assumed of a device by its name."""
    if gpu is None:
        return Rates(CPU_FLOPS, CPU_FLOPS, "")
    known = [device for device in (A100, H100, H200) if device.name in gpu]
    flops = known[0].flops if known else OTHER_GPU_FLOPS
    sampling, training = SAMPLING_SHARE * flops, TRAINING_SHARE * flops
    return Rates(around(sampling, GPU_FACTOR), around(training, GPU_FACTOR), "")


def spread(found: list[float]) -> Range:
    """The interval that measured rates span, widened."""
    middle = sorted(found)[len(found) // 2]
    return Range(min(found) / MEASURED_FACTOR, middle, max(found) * MEASURED_FACTOR)


def measured_sampling(layout: Layout, num_parameters: float) -> Iterator[float]:
    """The rate of the profile."""
    yield from measured(layout.profile, "profile", ("profile",), num_parameters)


def measured_training(layout: Layout, num_parameters: float) -> Iterator[float]:
    """The rate of every run that was trained to its end: sampling, scoring and updating."""
    for folder in sorted(layout.root.glob("runs/*/*/train")):
        yield from measured(folder, "train", ("generate", "score", "update"), num_parameters)


def measured(
    folder: Path, part: str, phases: tuple[str, ...], num_parameters: float
) -> Iterator[float]:
    """What a folder's files say, if they are there and of a policy of about this size."""
    with suppress(ArtifactError, KeyError, TypeError, AttributeError):
        flops, cost = read_sealed(folder / "flops.json"), read_sealed(folder / "cost.json")
        charged = sum(flops["charged"][phase] for phase in phases)
        sampled = phases[0]
        # 2 P for every token that is sampled
        size = flops["charged"][sampled] / max(2.0 * flops["tokens"][sampled], 1.0)
        seconds = cost["seconds"][part]
        is_same = num_parameters / SAME_SIZE <= size <= num_parameters * SAME_SIZE
        if seconds > 0 and charged > 0 and is_same:
            yield charged / seconds
