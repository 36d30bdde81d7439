"""Whole runs against their recorded losses: moving code about must not change what is computed.

The numbers were recorded when the clipped ratio was still of policy to sampler and the loss divided
by what `select` kept; both are settings now. They are a record, not a derivation: a change of the
maths that is meant records them anew and says why.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.train.worlds import make_world, run_in_process

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]
OLD: dict[str, Any] = {
    "divisor": "kept",
    "correction": {"ratio_to": "sampler", "level": "token", "cap": 2.0, "mode": "truncate"},
}
METHODS: dict[str, dict[str, Any]] = {
    "as it was": OLD,
    # truncated importance weights were a loss of their own, `tis`
    "knapsack, micro_groups, pods, rloo, truncated weights, KL": {
        "divisor": "kept",
        "kl_coefficient": 0.1,
        "control": {"method": "knapsack", "smallest": 2, "largest": 16, "discount": 0.5},
        "generate": {"method": "micro_groups", "cache_megabytes": 0.5, "order": "lpt"},
        "select": {"method": "pods", "keep": 3},
        "advantage": {"method": "rloo"},
        "loss": {
            "method": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "ratio": "token",
            "normalize": "token",
        },
    },
    "dapo, mixed, dr_grpo, sequence ratio": {
        **OLD,
        "control": {"method": "dapo", "max_refills": 2},
        "select": {"method": "mixed"},
        "advantage": {"method": "dr_grpo"},
        "loss": {
            "method": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "ratio": "sequence",
            "normalize": "constant",
        },
    },
}
LOSSES = [
    [0.0, 0.04761907, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.03413698, 0.002465832, 0.005108336, 0.009960445, 0.01145191, 0.01253314, 0.01310586],
    [0.0, -0.003571433, 0.0, 0.0, 0.0],
]
GRADIENT_NORMS = [
    [0.9216785, 1.913938, 2.145267, 1.209601, 1.967166, 2.659776, 0.6327178, 1.369048],
    [0.6371682, 1.295055, 1.288691, 1.986896, 1.23053, 1.68724, 0.7534859, 0.8993538],
    [0.3477789, 0.3341148, 0.2971697, 0.3152352, 0.3479647],
]


@pytest.mark.parametrize(
    ("name", "losses", "norms"), list(zip(METHODS, LOSSES, GRADIENT_NORMS, strict=True))
)
def test_a_run_finds_its_recorded_losses(
    name: str, losses: list[float], norms: list[float], guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES * 2)
    steps = run_in_process(layout, METHODS[name]).state.steps
    assert [row["loss"] for row in steps] == pytest.approx(losses, abs=1e-5)
    assert [row["grad_norm"] for row in steps] == pytest.approx(norms, abs=1e-5)
