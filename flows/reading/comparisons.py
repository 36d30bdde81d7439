"""Show prompts with samples of the policy before and after training, of the profile, of the
baseline, or of another trainer, and the samples' verdicts and extracted answers."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tasks.common.artifacts import IMPORTED, OUTCOMES, PROMPTS, ROLLOUTS, SPLITS
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.statistics import score_prompts
from tasks.models.provenance import metrics_of

RULE = "=" * 78  # before each prompt
SIDES = ("before", "after")
EXTERNAL = "external/"  # begins the names of imported rollouts, and of evaluated checkpoints
MOVES = {
    "learned": pl.col("after") > pl.col("before"),
    "lost": pl.col("after") < pl.col("before"),
    "solved": (pl.col("before") == 1) & (pl.col("after") == 1),
    "unsolved": (pl.col("before") == 0) & (pl.col("after") == 0),
}
"""Classes of prompts by the shares of correct samples before and after training. Each outcome is
also a class: the prompts with at least one sample of this outcome after training."""
CLASSES = (*MOVES, *OUTCOMES)


@dataclass(frozen=True)
class Request:
    """The requested prompts (by id prefix and class), their number, and the samples per side."""

    prompt: str | None
    kind: str | None
    num_prompts: int
    num_samples: int


def read(layout: Layout, recipe: str, seed: int | None, request: Request) -> Iterator[str]:
    """Yield a count, then the requested prompts with samples. Without a seed, `recipe` is `profile`
    (its training prompts), `baseline`, `external/NAME` (imported rollouts) or `external/NAME/eval`
    (a checkpoint, beside the initial policy). Raise ArtifactError if none match."""
    is_external = is_imported(recipe)
    is_profile = (recipe, seed) == ("profile", None)
    splits = SPLITS if is_external else ("train",) if is_profile else ("test",)
    files, split = paths(layout, recipe, seed), "" if is_external else f"{splits[0]} "
    prompts = pl.concat([PROMPTS.read(layout.prompts(split)) for split in splits])
    rates = pass_rates(files, None if is_external else {*prompts["prompt_id"]}, split)
    selected = choose(rates, [*files.values()][-1], request, split)
    cell = recipe if seed is None else f"{recipe}, seed {seed}"
    yield f"{len(selected)} of {len(rates)} {split}prompts; {cell}"
    for row in selected.head(request.num_prompts).iter_rows(named=True):
        found = prompts.filter(pl.col("prompt_id") == row["prompt_id"]).row(0, named=True)
        yield heading(found, {side: row[side] for side in files})
        for side in files:
            yield from samples(files[side], side, row["prompt_id"], request)


def is_imported(recipe: str) -> bool:
    """Return whether `recipe` is external/NAME, not external/NAME/eval."""
    return recipe.startswith(EXTERNAL) and recipe.count("/") == 1


def paths(layout: Layout, recipe: str, seed: int | None) -> dict[str, Path]:
    """Return the path of each side's ROLLOUTS table. Raise ArtifactError for a recipe that has not
    been evaluated (the message lists the evaluated ones), or not with its present weights."""
    if recipe.startswith(EXTERNAL):
        found = {
            path.parent.relative_to(layout.root).as_posix(): path
            for path in sorted(layout.root.glob("external/**/rollouts.parquet"))
        }
        if recipe not in found:
            names = ", ".join(found) or "nothing yet"
            raise ArtifactError(f"{recipe} was not read by `winnow import`; there is: {names}")
        if is_imported(recipe):
            return {recipe: found[recipe]}
        metrics_of(layout.policy_card, layout.baseline)
        metrics_of(found[recipe].parents[1] / "checkpoint.json", found[recipe].parent)
        return {"before": layout.baseline / "rollouts.parquet", "after": found[recipe]}
    if seed is None:
        if recipe == "baseline":
            metrics_of(layout.policy_card, layout.baseline)
        return {recipe: layout.root / recipe / "rollouts.parquet"}
    folders = layout.baseline, layout.evaluation(recipe, seed)
    files = {side: f / "rollouts.parquet" for side, f in zip(SIDES, folders, strict=True)}
    if not files["after"].is_file():
        there = sorted(
            f"{path.parts[-4]} --seed {path.parts[-3]}"
            for path in layout.root.glob("runs/*/*/eval/rollouts.parquet")
        )
        raise ArtifactError(
            f"{files['after']} does not exist: {recipe} with seed {seed} has not been evaluated. "
            f"Evaluated: {', '.join(there) or 'nothing yet (winnow run)'}"
        )
    metrics_of(layout.policy_card, folders[0])
    metrics_of(layout.trained_card(recipe, seed), folders[1])
    return files


def pass_rates(files: dict[str, Path], prompts: set[str] | None, split: str) -> pl.DataFrame:
    """Return a row per prompt: for each side, the share of correct samples among the graded ones;
    null if none is graded. A single side is `before` and `after`, too. Raise ArtifactError if a
    side was not measured on exactly `prompts`, if these are given."""
    share = (pl.col("correct") / pl.col("trials")).fill_nan(None)
    sides = []
    for side, path in files.items():
        table = ROLLOUTS if prompts is not None else IMPORTED
        scores = score_prompts(table.read_columns(path, ["prompt_id", "greedy", "outcome"]))
        if prompts is not None and {*scores["prompt_id"]} != prompts:
            raise ArtifactError(
                f"{path} has other prompts than the {split}split, which has changed since: "
                "run `winnow run`"
            )
        sides.append(scores.select("prompt_id", share.alias(side)))
    if len(sides) == 1:
        return sides[0].with_columns(pl.col(*files).alias(side) for side in SIDES)
    return sides[0].join(sides[1], on="prompt_id", maintain_order="left")


def choose(rates: pl.DataFrame, after: Path, request: Request, split: str) -> pl.DataFrame:
    """Return the requested rows of `rates`, in order. Raise ArtifactError if none is left."""
    if request.prompt is not None:
        rates = rates.filter(pl.col("prompt_id").str.starts_with(request.prompt))
    if request.kind in MOVES:
        rates = rates.filter(MOVES[request.kind])
    elif request.kind is not None:
        has_one = ~pl.col("greedy") & (pl.col("outcome") == request.kind)
        ids = pl.scan_parquet(after).filter(has_one).select("prompt_id").unique().collect()
        rates = rates.join(ids, on="prompt_id", how="semi", maintain_order="left")
    if rates.is_empty():
        what = f" whose id begins with {request.prompt}" if request.prompt is not None else ""
        kind = f" of the class {request.kind}" if request.kind else ""
        raise ArtifactError(f"there is no {split}prompt{what}{kind}")
    return rates


def heading(prompt: dict[str, str], rates: dict[str, float | None]) -> str:
    """Return a prompt as text, with its gold answer and its pass rates."""
    shares = {side: "–" if share is None else f"{share:.0%}" for side, share in rates.items()}
    solved = ", ".join(f"{shares[s]} {s if s in SIDES else f'in the {s}'}" for s in shares)
    return (
        f"\n{RULE}\nprompt {prompt['prompt_id']}   solved {solved}\n\n"
        f"{escaped(prompt['prompt'])}\n\n"
        f"gold: {escaped(prompt['answer'])}   ({escaped(prompt['verifier'])})"
    )


def samples(path: Path, side: str, prompt: str, request: Request) -> Iterator[str]:
    """Yield a prompt's first samples on one side as text, those of the requested outcome before the
    others, then the greedy one."""
    rollouts = (IMPORTED if side.startswith(EXTERNAL) else ROLLOUTS).check(
        pl.scan_parquet(path).filter(pl.col("prompt_id") == prompt).collect(), str(path)
    )
    order = pl.col("outcome") != (request.kind or ""), pl.col("sample_index")
    sampled = rollouts.filter(~pl.col("greedy")).sort(order).head(request.num_samples)
    for row in pl.concat([sampled, rollouts.filter(pl.col("greedy"))]).iter_rows(named=True):
        name = "greedy" if row["greedy"] else f"sample {row['sample_index']}"
        answer = "none" if not row["answer"] else escaped(row["answer"])
        yield (
            f"\n--- {side}, {name}: {row['outcome']}, reward {row['reward'] or 0:g}, answer "
            f"{answer}, {row['completion_tokens']} tokens, ended by {row['finish_reason']}\n"
            f"{escaped(row['text'])}"
        )


def escaped(text: str) -> str:
    """Return a model's text in a form that is safe for a terminal. The text may contain characters
    that move the cursor, change colours or the title, or reverse the direction of writing. Every
    character that is not visible is replaced by its escape, such as `\\x1b` or `\\u202e`."""
    return "".join(
        c if c in "\n\t" or is_visible(c) else c.encode("unicode_escape").decode() for c in text
    )


def is_visible(character: str) -> bool:
    """Return whether a character is visible or a space. Python considers spaces other than U+0020
    unprintable, but they are harmless."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
