"""The gates between profile and training, with numbers by hand."""

import polars as pl
import pytest

from tasks.allocate.run import check_gates
from tasks.allocate.settings import Gates
from tasks.common.params import ParamsError

GATES = Gates(min_solved_rate=0.001, max_truncated_rate=0.95)
EIGHTH = Gates(min_solved_rate=0.125, max_truncated_rate=0.5)
HALF = Gates(0.5, 1.0)


def profile(
    correct: list[int], truncated_rate: list[float], error: int = 0, longest: int = 9
) -> pl.DataFrame:
    columns = {"num_samples": 8, "error": error, "correct": correct}
    lengths = {"truncated_rate": truncated_rate, "completion_tokens_max": longest}
    return pl.DataFrame({**columns, **lengths})


@pytest.mark.parametrize(
    ("gates", "found", "message"),
    [
        (
            GATES,
            profile([0] * 8, [1.0] * 7 + [0.875]),
            r"of 64 samples 0 are correct \(0.0%\), and 98.4% are cut off .* raise sampling"
            r".max_tokens.*gates.min_solved_rate 0.001 is not reached",
        ),
        (GATES, profile([0] * 8, [0.0] * 8), "use easier prompts or a stronger policy"),
        (GATES, profile([0] * 8, [0.0] * 8, longest=1), "after one token: set `raw: true`"),
        (GATES, profile([1, 0], [1.0] * 2), "max_truncated_rate 0.95 is passed.*raise it"),
        (EIGHTH, profile([1, 0], [0.5, 0.5]), "is not reached"),
        (HALF, profile([1], [0.0]), "min_solved_rate 0.5 is not reached"),
    ],
)
def test_a_profile_that_stops_the_run_leads_to_advice(
    gates: Gates, found: pl.DataFrame, message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        check_gates(gates, found, 64)


def test_the_limits_themselves_pass_and_errors_are_not_wrong_answers() -> None:
    check_gates(Gates(min_solved_rate=0.0, max_truncated_rate=1.0), profile([0], [1.0]), 64)
    check_gates(EIGHTH, profile([1, 1], [0.5, 0.5]), 64)
    check_gates(HALF, profile([1], [0.0], error=6), 64)  # one of two graded samples is correct


def test_empty_completions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    check_gates(Gates(0.0, 1.0), profile([0] * 8, [0.0] * 8, longest=1), 64)
    assert "8 of 8 prompts get no text at all" in caplog.text
    caplog.clear()
    check_gates(Gates(0.0, 1.0), profile([0] * 8, [1.0] * 8, longest=1), 1)
    assert not caplog.text


@pytest.mark.parametrize("rates", [(-0.1, 1.0), (0.0, 1.5)])
def test_gates_are_from_0_to_1(rates: tuple[float, float]) -> None:
    with pytest.raises(ParamsError, match="gates"):
        Gates(*rates)
