"""The gates between profile and training, with numbers by hand."""

import polars as pl
import pytest

from tasks.allocate.run import check_gates
from tasks.allocate.settings import Gates
from tasks.common.params import ParamsError

GATES = Gates(min_solved_rate=0.001, max_truncated_rate=0.95)


def profile(
    correct: list[int], truncated_rate: list[float], error: int = 0, longest: int = 9
) -> pl.DataFrame:
    columns = {"num_samples": 8, "error": error, "correct": correct}
    lengths = {"truncated_rate": truncated_rate, "completion_tokens_max": longest}
    return pl.DataFrame({**columns, **lengths})


def test_truncated_and_unsolved_samples_stop_the_run_with_advice() -> None:
    nothing = profile([0] * 8, [1.0] * 7 + [0.875])
    with pytest.raises(ParamsError) as error:
        check_gates(GATES, nothing, 64)
    message = str(error.value)
    assert "of 64 samples 0 are correct (0.0%), and 98.4% are cut off" in message
    assert "raise sampling.max_tokens" in message
    assert "gates.min_solved_rate 0.001 is not reached" in message


def test_complete_but_unsolved_samples_stop_the_run_with_advice() -> None:
    with pytest.raises(ParamsError, match="use easier prompts or a stronger policy"):
        check_gates(GATES, profile([0] * 8, [0.0] * 8), 64)


def test_empty_completions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ParamsError, match="completions end after one token: set `raw: true`"):
        check_gates(GATES, profile([0] * 8, [0.0] * 8, longest=1), 64)
    caplog.clear()
    check_gates(Gates(0.0, 1.0), profile([0] * 8, [0.0] * 8, longest=1), 64)
    assert "8 of 8 prompts get no text at all" in caplog.text
    caplog.clear()
    check_gates(Gates(0.0, 1.0), profile([0] * 8, [1.0] * 8, longest=1), 1)
    assert not caplog.text


def test_truncated_completions_stop_a_partly_correct_policy() -> None:
    with pytest.raises(ParamsError, match=r"gates.max_truncated_rate 0.95 is passed.*raise it"):
        check_gates(GATES, profile([1, 0], [1.0, 1.0]), 64)


def test_the_limits_themselves_pass() -> None:
    check_gates(Gates(min_solved_rate=0.0, max_truncated_rate=1.0), profile([0], [1.0]), 64)
    at_limit = Gates(min_solved_rate=0.125, max_truncated_rate=0.5)
    check_gates(at_limit, profile([1, 1], [0.5, 0.5]), 64)
    with pytest.raises(ParamsError):
        check_gates(at_limit, profile([1, 0], [0.5, 0.5]), 64)


def test_errors_are_not_wrong_answers() -> None:
    """One of two graded samples is correct; six could not be graded."""
    half = Gates(0.5, 1.0)
    check_gates(half, profile([1], [0.0], error=6), 64)
    with pytest.raises(ParamsError, match=r"min_solved_rate 0.5 is not reached"):
        check_gates(half, profile([1], [0.0]), 64)


@pytest.mark.parametrize("rates", [(-0.1, 1.0), (0.0, 1.5)])
def test_gates_are_from_0_to_1(rates: tuple[float, float]) -> None:
    with pytest.raises(ParamsError, match="gates"):
        Gates(*rates)
