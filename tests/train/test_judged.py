"""Training on the verdicts of a language model: the ledger includes its tokens."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.accounting.ledger import Ledger
from tasks.common.artifacts import PROMPTS, Layout
from tasks.grading.background import BackgroundGrader
from tests.grading.judge_server import configured, judge_server
from tests.train.worlds import make_trainer, make_world, train_to_end

FLOPS = 2 * 7e9 * 100  # per verdict


def judged_world(root: Path, policy: Path, group_sizes: list[int]) -> Layout:
    """Make a world whose answers a language model judges."""
    layout = make_world(root, policy, group_sizes)
    for split in ("train", "validation"):
        path = layout.prompts(split)
        PROMPTS.write(path, PROMPTS.read(path).with_columns(verifier=pl.lit("j")))
    return layout


def judged_run(layout: Layout, **changes: Any) -> tuple[Ledger, float]:
    """Return the ledger of a run, and the reported FLOPs of its judge."""
    paid: list[float] = []
    with judge_server() as server:
        trainer = make_trainer(layout, **changes)
        settings = replace(trainer.collector.grader.grader.settings, verifiers=configured(server))
        with closing(BackgroundGrader(settings, judged=layout.judged)) as grader:
            trainer.collector.grader = grader
            judge_flops = grader.grader.judge_flops

            def counted() -> float:
                paid.append(judge_flops())
                return paid[-1]

            grader.grader.judge_flops = counted  # type: ignore[method-assign]
            train_to_end(trainer, layout)
    return trainer.state.ledger, sum(paid)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_verdicts_before_a_branch_are_charged_once(
    limit: int, tmp_path: Path, guesser: Path
) -> None:
    layout = judged_world(tmp_path, guesser, [4] * 36)
    ledger, paid = judged_run(layout, max_staleness=limit, decay_share=0.4, branches=[0.5])
    # verdicts dominate the FLOPs
    verdicts = sum(round(flops / FLOPS) for flops in ledger.executed.values())
    assert ledger.executed["branch"] > FLOPS
    assert verdicts == round(paid / FLOPS)


def test_judging_is_charged_as_scoring(tmp_path: Path, guesser: Path) -> None:
    layout = judged_world(tmp_path, guesser, [4, 4, 4])
    ledger, _ = judged_run(layout)
    for account in (ledger.executed, ledger.charged, ledger.charged_mixed, ledger.charged_paper):
        assert account["score"] == 12 * FLOPS
    assert ledger.executed["evaluate"] > FLOPS
    assert layout.judged.exists()
