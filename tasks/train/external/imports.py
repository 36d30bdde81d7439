"""Match the rollouts of another trainer with this root's prompts, grade them again, and store them
as `external/NAME/rollouts.parquet`."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common import params
from tasks.common.artifacts import IMPORTED, PROMPTS, SPLITS
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.progress import progress
from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.models.policy import Policy, load_tokenizer, read_policy
from tasks.models.prompts import encode_prompts
from tasks.train.external import dumps
from tasks.train.external.dumps import Rollout

CHUNK = 2048  # rollouts that are graded together


@dataclass
class Summary:
    """The content of a dump: counts, and rollouts whose verdict here differs from the trainer's."""

    num_rollouts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    prompts: set[str] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    num_scored: int = 0
    num_differing: int = 0
    differing: list[str] = field(default_factory=list)  # the first ones

    def numbers(self) -> dict[str, Any]:
        return {
            "num_rollouts": self.num_rollouts,
            "num_prompts": len(self.prompts),
            "num_steps": len(self.steps),
            "outcomes": dict(self.outcomes),
            "num_scored": self.num_scored,
            "num_differing": self.num_differing,
        }


class Known:
    """Prompts (PROMPTS) by id and by text."""

    def __init__(
        self, table: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, policy: Policy
    ) -> None:
        self.tokenizer = tokenizer
        encoded = encode_prompts(table, tokenizer, policy, 0)
        self.rows = {row["prompt_id"]: row for row in table.iter_rows(named=True)}
        self.lengths = dict(zip(table["prompt_id"], map(len, encoded), strict=True))
        self.by_text: defaultdict[str, set[str]] = defaultdict(set)
        rendered = [
            self.tokenizer.batch_decode(encoded, skip_special_tokens=skip) for skip in (True, False)
        ]
        for texts in zip(table["prompt_id"], table["prompt"], *rendered, strict=True):
            for text in texts[1:]:
                self.by_text[text.strip()].add(texts[0])

    def decoded(self, rollout: Rollout) -> Rollout:
        """Return a rollout with its texts."""
        if rollout.tokens is None:
            return rollout
        prompt, completion = (
            str(self.tokenizer.decode(ids, skip_special_tokens=skip))
            for ids, skip in zip(rollout.tokens, (False, True), strict=True)
        )
        return replace(rollout, prompt=prompt, completion=completion)

    def match(self, rollout: Rollout, is_plain: bool) -> str:
        """Return the id of a rollout's prompt. Raise ArtifactError if none or several match."""
        if rollout.truth is not None and not is_plain:
            try:
                found = str(json.loads(rollout.truth)["prompt_id"])
            except (ValueError, TypeError, KeyError) as error:
                raise ArtifactError(
                    f"{rollout.where}: the ground truth {rollout.truth[:60]!r} is not one of "
                    "`winnow export`; if it was made with --plain, import with --plain"
                ) from error
            if found not in self.rows:
                raise ArtifactError(f"{rollout.where}: prompt {found} is not in this data root")
            if rollout.tokens and self.rows[found]["prompt"].strip() not in rollout.prompt:
                raise ArtifactError(
                    f"{rollout.where}: its tokens do not spell prompt {found}, but "
                    f"{rollout.prompt[:60]!r}: the trainer's tokenizer is not the policy's"
                )
            return found
        ids = self.by_text.get(rollout.prompt.strip(), set())
        if len(ids) != 1:
            what = f"is the text of {len(ids)} prompts" if ids else "is no prompt of this data root"
            raise ArtifactError(f"{rollout.where}: {rollout.prompt[:60]!r} {what}")
        return next(iter(ids))


def import_rollouts(
    layout: Layout,
    values: Mapping[str, Any],
    source: str,
    folder: Path,
    name: str,
    *,
    is_plain: bool = False,
) -> Summary:
    """Store the rollouts of a dump, with verdicts of this root's verifiers. Return a summary. Raise
    the errors of `dumps.read` and `Known.match`; then nothing is written."""
    verify = replace(params.section(values, "verify", Verify), max_failure_rate=1.0)
    policy = read_policy(layout)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    table = pl.concat([PROMPTS.read(layout.prompts(split)) for split in SPLITS])
    out, summary, known = layout.external(name), Summary(), Known(table, tokenizer, policy)
    with Grader(verify, layout.judged) as grader, progress(None, "import", "rollout") as bar:
        rollouts = dumps.read(source, folder)

        def parts() -> Iterator[pl.DataFrame]:
            index: Counter[str] = Counter()
            while some := [known.decoded(one) for one in islice(rollouts, CHUNK)]:
                yield graded(some, known, grader, index, summary, is_plain)
                bar.update(len(some))

        IMPORTED.write_parts(out / "rollouts.parquet", parts())
    write_checked(out / "summary.json", {"from": source, **summary.numbers()})
    return summary


def graded(
    rollouts: list[Rollout],
    known: Known,
    grader: Grader,
    index: Counter[str],
    summary: Summary,
    is_plain: bool,
) -> pl.DataFrame:
    """Return rollouts as rows of IMPORTED, numbered by prompt, and add them to the summary."""
    ids = [known.match(rollout, is_plain) for rollout in rollouts]
    answers = [
        Answer(row["verifier"], rollout.completion, row["answer"], False, row["prompt"])
        for rollout, row in zip(rollouts, map(known.rows.__getitem__, ids), strict=True)
    ]
    tokens = known.tokenizer([one.completion for one in rollouts], add_special_tokens=False)
    rows = []
    for rollout, id_, verdict, ids_of in zip(
        rollouts, ids, grader.grade(answers), tokens["input_ids"], strict=True
    ):
        rows.append(
            {
                "prompt_id": id_,
                "sample_index": index[id_],
                "greedy": False,
                "outcome": verdict.outcome,
                "reward": verdict.reward,
                "score": verdict.score,
                "parts": [{"verifier": name, "score": score} for name, score in verdict.parts],
                "answer": verdict.answer,
                "text": rollout.completion,
                "finish_reason": "unknown",
                "prompt_tokens": known.lengths[id_],
                "completion_tokens": len(ids_of),
                "step": rollout.step,
                "trainer_score": rollout.score,
            }
        )
        index[id_] += 1
        summary.outcomes[verdict.outcome] += 1
        summary.steps.add(rollout.step)
        if rollout.score is not None:
            summary.num_scored += 1
            if abs(rollout.score - verdict.reward) > 1e-6:
                summary.num_differing += 1
                if len(summary.differing) < 5:
                    text = f"{rollout.where}: {rollout.score:g} there, {verdict.outcome} here"
                    summary.differing.append(text)
    summary.num_rollouts += len(rows)
    summary.prompts.update(ids)
    return IMPORTED.frame(rows)
