"""Modelled device time, compared with measurements and with the numbers in METHODS."""

import numpy as np
import pytest

from tasks.common.accounting.device_time import A100, H100, LARGE, SMALL, DeviceTime


@pytest.mark.parametrize(
    ("rows", "context", "milliseconds"), [(1, 256, 9.44), (8, 2048, 10.45), (32, 1024, 12.43)]
)
def test_time_of_a_step_on_an_a100(rows: int, context: int, milliseconds: float) -> None:
    step = DeviceTime(LARGE, A100).steps(1, rows, rows * context)
    assert step * 1e3 == pytest.approx(milliseconds, abs=0.006)


@pytest.mark.parametrize(
    ("model", "microseconds"),
    [(LARGE, [6817, 951, 532, 322, 217, 165, 139]), (SMALL, [2296, 332, 192, 121, 86, 69, 60])],
)
def test_seconds_per_token_fall_with_concurrency(model, microseconds) -> None:
    time = DeviceTime(model, H100)
    found = [time.steps(1, rows, rows * 4096) / rows * 1e6 for rows in (1, 8, 16, 32, 64, 128, 256)]
    assert [round(value) for value in found] == microseconds


def test_wave_equals_a_simulation_by_token() -> None:
    """The simulation counts each token, in refilled slots and in the tail as well."""
    time, rng = DeviceTime(SMALL, H100), np.random.default_rng(0)
    prompts, lengths = rng.integers(1, 40, 30), rng.integers(1, 50, 30)
    for max_rows in (1, 4, 7, 100):
        waiting, flight, seconds = list(zip(prompts, lengths, strict=True)), [], 0.0
        while waiting or flight:
            while waiting and len(flight) < max_rows:
                prompt, length = waiting.pop(0)
                flight.append([int(prompt), int(length)])
            seconds += time.steps(1, len(flight), sum(held for held, _ in flight))
            flight = [[held + 1, left - 1] for held, left in flight if left > 1]
        assert time.wave(prompts, lengths, max_rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("model", "longest", "update"), [(LARGE, 2048, 118), (LARGE, 8192, 121), (SMALL, 2048, 24)]
)
def test_seconds_of_updates(model, longest: int, update: float) -> None:
    """Check the microseconds per token on an H100, at a mean length of 0.4 of the limit."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(0.4 * longest) - 0.18, 0.6, 20000), longest) + 512
    time = DeviceTime(model, H100)
    assert time.update(lengths) / lengths.sum() * 1e6 == pytest.approx(update, rel=0.02)
    assert time.read(lengths) * 3 * 0.5 / 0.4 == pytest.approx(time.update(lengths))
