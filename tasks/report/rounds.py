"""The rounds of an experiment side by side. A later round starts from a policy that the round
before it trained, so its result depends on the compute of all rounds before it.

One policy of each round is kept: the policy from which the next round started. The last round keeps
its champion, or its candidate if there is no champion. Costs are those of the leaderboard: they
include profiling if the recipe reads the profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.artifacts import PROFILE, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.recovery import how_to_restore
from tasks.models.provenance import require_same
from tasks.report.curves import COMPARED
from tasks.report.evidence import Json
from tasks.report.paired import CLASSES, class_of
from tasks.report.results import Results, Row, name_of

KINDS = ("never solved", "learnable", "always solved", "not known")


@dataclass(frozen=True)
class Round:
    """One round: the metrics of its initial policy, its leaderboard, the row of the kept policy and
    why it is kept, and the profile. `source` is where the initial policy came from."""

    number: int
    source: str
    initial: Mapping[str, Any]
    rows: Sequence[Row]
    kept: Row
    why: str
    profile: pl.DataFrame


def read_rounds(before: Sequence[Path], results: Results) -> list[Round]:
    """Return the rounds whose data roots are `before`, in order, and this round; an empty list if
    `before` is empty."""
    if not before:
        return []
    evidence, summary = results.evidence, results.summary
    layouts = [Layout(root) for root in before]
    cards = [*(read_checked(layout.policy_card) for layout in layouts), evidence.policy]
    found = [
        read_round(number, layout, cards[number - 1], cards[number])
        for number, layout in enumerate(layouts, start=1)
    ]
    chosen = summary["champion"] or summary["candidate"]
    last = Round(
        len(found) + 1,
        str(evidence.policy["source"]),
        summary["initial"],
        results.rows,
        row_of(results.rows, name_of(chosen), "this round"),
        "champion" if summary["champion"] else "candidate, no champion",
        evidence.profile,
    )
    return [*found, last]


def read_round(number: int, layout: Layout, card: Json, after: Json) -> Round:
    """Read an earlier round. `card` is that of its initial policy, `after` that of the kept one.
    Raise ArtifactError for a leaderboard whose digest differs from that in the summary."""
    cell = cell_of(after["source"])
    path = layout.report / "summary.json"
    summary = read_checked(path)
    board = layout.report / "leaderboard.json"
    if digest_file(board) != summary["digests"][board.name]:
        raise ArtifactError(f"{board} is damaged, or was edited. {how_to_restore(board)}")
    rows: list[Row] = read_json(board)
    kept = row_of(rows, cell, str(layout.report))
    require_same(path, f"policy of {cell}", summary["policies"][cell], after["digest"])
    is_champion = summary["champion"] and name_of(summary["champion"]) == cell
    return Round(
        number,
        str(card["source"]),
        summary["initial"],
        rows,
        kept,
        "champion" if is_champion else "by name",
        PROFILE.read(layout.profile / "profile.parquet"),
    )


def cell_of(source: str) -> str:
    """Return `recipe/seed` for `runs/RECIPE/SEED/train/policy`. Otherwise raise ArtifactError."""
    parts = Path(source).parts[-5:]
    if len(parts) < 5 or (parts[0], *parts[3:]) != ("runs", "train", "policy"):
        raise ArtifactError(
            f"the policy {source} was not trained in any round: run the stages of rounds with "
            "`winnow run --rounds`"
        )
    return f"{parts[1]}/{parts[2]}"


def row_of(rows: Sequence[Row], cell: str, where: str) -> Row:
    """Return the leaderboard's row of a cell. Raise ArtifactError if there is none."""
    for row in rows:
        if name_of(row) == cell:
            return row
    raise ArtifactError(
        f"{cell}, from which the next round started, is not on the leaderboard of {where}; bring "
        "the rounds up to date: `winnow run --rounds`"
    )


def cumulative(rounds: Sequence[Round], account: str) -> list[float]:
    """Return, for each round, the FLOPs in `account` of its kept policy and all earlier ones."""
    return list(accumulate(one.kept[f"flops_{account}"]["total"] for one in rounds))


def kinds(profile: pl.DataFrame) -> list[int]:
    """Return the number of prompts of each of KINDS, by their pass rates in a profile."""
    places = kind_places(profile["pass_rate"].drop_nulls())
    return [*map(int, np.bincount(places, minlength=3)), len(profile) - len(places)]


def kind_places(rates: pl.Series) -> npt.NDArray[np.int64]:
    """Return the index into KINDS of each pass rate."""
    classes = class_of(rates)
    return np.where(classes == 0, 0, np.where(classes == len(CLASSES) - 1, 2, 1))


def summary_of(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return the part `rounds` of `summary.json`."""
    spent = {account: cumulative(rounds, account) for account in COMPARED}
    keys = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy")
    return [
        {
            "round": one.number,
            "source": one.source,
            "initial": {key: one.initial[key] for key in keys},
            "kept": {
                **{key: one.kept[key] for key in ("recipe", "seed")},
                "why": one.why,
                **{key: one.kept[key] for key in keys},
            },
            "flops": {
                account: {
                    **{part: one.kept[f"flops_{account}"][part] for part in ("profile", "total")},
                    "cumulative": spent[account][place],
                }
                for account in COMPARED
            },
            "prompts": dict(zip(KINDS, kinds(one.profile), strict=True)),
        }
        for place, one in enumerate(rounds)
    ]
