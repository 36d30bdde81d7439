"""Splits by content and seed, by weight and cap, and by named sources. And the errors for too few
rows."""

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.questions.duplicates import resolve
from tasks.ingest.settings import Ingest, Sizes, Source
from tasks.ingest.splits import split
from tests.ingest.helpers import row, spool


def share(split: Any, weight: float | None, max_rows: int | None) -> Source:
    """Return an entry of `ingest.sources` with settings of the splits."""
    return Source("gsm8k", {}, split=split, weight=weight, max_rows=max_rows)


ANY = share(None, None, None)


def nothing(train: pl.DataFrame, evaluation: pl.DataFrame) -> pl.DataFrame:
    return train.head(0).select("row", other="row", reason=pl.lit("contaminated"))


def parts(
    folder: Path, rows: Any, sizes: Sizes, *shares: Source, seed: int = 0, dropped: Any = nothing
) -> dict[str, set[str]]:
    """Return the questions of every split."""
    folder.mkdir(exist_ok=True)
    kept = spool(folder, *rows, seed=seed)
    index = split(
        resolve(kept.index, [one.split for one in shares or (ANY,)]),
        sizes,
        shares or (ANY,),
        dropped,
    )
    table = index.with_columns(question=kept.take(index["row"], "question")["question"])
    return {
        name: set(table.filter(pl.col("split") == name)["question"])
        for name in ("train", "validation", "test")
    }


def problems(count: int, name: str = "problem") -> list[Row]:
    return [row(f"{name} {number}") for number in range(count)]


def test_splits_depend_on_content_and_seed_not_on_order(tmp_path: Path) -> None:
    rows, sizes = problems(60), Sizes(30, 10, 15)
    one = parts(tmp_path, rows, sizes)
    assert [len(one[name]) for name in ("train", "validation", "test")] == [30, 10, 15]
    assert not one["train"] & one["test"]
    assert not one["validation"] & (one["train"] | one["test"])
    assert parts(tmp_path / "b", rows[::-1], sizes) == one
    assert parts(tmp_path / "c", rows, sizes, seed=1)["test"] != one["test"]
    largest = parts(tmp_path / "d", rows, Sizes(None, 10, 15))
    assert len(largest["train"]) == 35
    assert largest["test"] == one["test"]


def test_every_split_follows_the_weights(tmp_path: Path) -> None:
    rows = [(0, one) for one in problems(100, "a")] + [(1, one) for one in problems(30, "b")]
    weights = (share(None, 3.0, None), share(None, 1.0, None))
    found = parts(tmp_path, rows, Sizes(40, 8, 12), *weights)
    shares = {name: Counter(question[0] for question in part) for name, part in found.items()}
    assert shares == {
        "train": {"a": 30, "b": 10},
        "validation": {"a": 6, "b": 2},
        "test": {"a": 9, "b": 3},
    }
    rest = parts(tmp_path / "b", rows, Sizes(None, 8, 12), *weights)["train"]
    assert Counter(question[0] for question in rest) == {"a": 75, "b": 25}
    few = [(n, one) for n, size in enumerate((1, 1, 10)) for one in problems(size, "abc"[n])]
    uneven = [share(None, weight, None) for weight in (1.0, 2.0, 3.0)]
    rest = parts(tmp_path / "c", few, Sizes(None, 0, 0), *uneven)["train"]
    assert Counter(question[0] for question in rest) == {"b": 1, "c": 1}


def test_cap_selects_the_same_rows_in_any_order(tmp_path: Path) -> None:
    shares = (share(None, None, 5), ANY)
    rows = [(0, one) for one in problems(50, "a")] + [(1, one) for one in problems(50, "b")]
    found = parts(tmp_path, rows, Sizes(None, 1, 1), *shares)
    union = set.union(*found.values())
    assert Counter(question[0] for question in union) == {"a": 5, "b": 50}
    assert parts(tmp_path / "b", rows[::-1], Sizes(None, 1, 1), *shares) == found


def test_contaminated_rows_are_replaced_by_other_rows(tmp_path: Path) -> None:
    rows, sizes = problems(30), Sizes(10, 5, 5)
    before = parts(tmp_path, rows, sizes)

    def dropped(train: pl.DataFrame, evaluation: pl.DataFrame) -> pl.DataFrame:
        assert (train.height, evaluation.height) == (20, 10)
        return train.head(3).select(
            "row", other=pl.lit(evaluation["row"][0]), reason=pl.lit("contaminated")
        )

    after = parts(tmp_path / "b", rows, sizes, dropped=dropped)
    assert after["test"] == before["test"]
    assert (len(after["train"]), len(after["train"] & before["train"])) == (10, 7)


def test_error_for_too_few_rows_has_the_numbers(tmp_path: Path) -> None:
    rows = [*problems(3), row("problem 1", line=7), Rejection(8, "", "empty_answer", "", "mine")]
    with pytest.raises(
        StageError, match=r"split validation .*1 duplicate.* needs 2 prompts and 1 are left"
    ):
        parts(tmp_path, rows, Sizes(3, 2, 2))
    with pytest.raises(
        StageError, match=r"split train .*1 empty_answer.* needs 1 prompts and 0 are left"
    ):
        parts(tmp_path / "b", rows, Sizes(None, 1, 2))
    weighted = [(0, one) for one in problems(20, "a")] + [(1, one) for one in problems(2, "b")]
    with pytest.raises(
        StageError, match=r"ingest.sources\[1\], by its weight, needs 4 prompts and 2 are left"
    ):
        parts(
            tmp_path / "c", weighted, Sizes(4, 1, 8), share(None, 1.0, None), share(None, 1.0, None)
        )


def test_null_takes_all_rows_of_sources_with_a_named_split(tmp_path: Path) -> None:
    shares = (ANY, share("test", None, None), share("test", None, 2))
    rows = [(0, one) for one in problems(20, "a")] + [(1, one) for one in problems(6, "b")]
    rows += [(2, one) for one in problems(6, "c")]
    found = parts(tmp_path, rows, Sizes(None, 5, None), *shares)
    assert Counter(question[0] for question in found["test"]) == {"b": 6, "c": 2}
    assert {question[0] for question in found["train"] | found["validation"]} == {"a"}
    assert (len(found["train"]), len(found["validation"])) == (15, 5)


TEST = share("test", None, None)


@pytest.mark.parametrize(
    ("sizes", "shares", "message"),
    [
        (Sizes(0, 1, 1), (ANY,), "train is 0; it must be at least 1"),
        (Sizes(1, 1, -1), (ANY,), "test is -1; it must be at least 0"),
        (Sizes(1, 1, 0), (ANY, TEST), r"test is 0, and ingest.sources\[1\] names that split"),
        (Sizes(1, 1, None), (ANY,), "test is null, .* and none does"),
    ],
)
def test_impossible_sizes_are_rejected_before_any_row_is_read(
    sizes: Sizes, shares: tuple[Source, ...], message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        Ingest(list(shares), splits=sizes)
