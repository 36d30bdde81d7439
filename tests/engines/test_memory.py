"""What training takes on one GPU, by hand."""

import pytest

from tasks.common.files import ArtifactError
from tasks.engines.memory import GIB, check_memory, peak_bytes


def test_peak_by_hand() -> None:
    # 1.5B parameters in float32: 6 GB of weights, 6 of gradients, 12 of moments; an engine of 20
    assert peak_bytes(6.0, 20.0, sleeps=False) == 12 + 6 + 20
    assert peak_bytes(6.0, 20.0, sleeps=True) == 12 + 20
    assert peak_bytes(6.0, 2.0, sleeps=True) == 12 + 6


def test_what_fits_is_not_refused() -> None:
    check_memory(6 * GIB, 20 * GIB, 38 * GIB, sleeps=False)
    check_memory(6 * GIB, 20 * GIB, 32 * GIB, sleeps=True)


@pytest.mark.parametrize(
    ("free", "sleeps", "message"),
    [
        (
            37,
            False,
            r"takes 38.0 GiB \(gradients 6.0, optimizer 12.0, engine 20.0\), "
            r"and 37.0 .* 19.0 .* engine.sleep",
        ),
        (
            31,
            True,
            r"takes 32.0 GiB .* 31.0 GiB are free; the engine may take 19.0 GiB at most: "
            r"lower engine.memory",
        ),
        (17, True, r"too much even without the engine"),
    ],
)
def test_what_does_not_fit_is_refused(free: int, sleeps: bool, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_memory(6 * GIB, 20 * GIB, free * GIB, sleeps=sleeps)
