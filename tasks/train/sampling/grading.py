"""Grading of completions as they end, while others are sampled."""

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future

import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.engines.engine import Samples
from tasks.engines.flops import turns_of
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer
from tasks.grading.verdict import Verdict
from tasks.models.prompts import decode
from tasks.train.data.columns import OWN_TOKENS, UNFINISHED, Ints, with_values

EARLY_SECONDS = 0.1  # minimum between two submissions to the grader during sampling


class Early:
    """Grades the completions of a request while others are sampled. `golds_B` has the verifier, the
    gold answer and the prompt of each; `begun_B` has the tokens that were sampled earlier."""

    def __init__(
        self,
        grader: BackgroundGrader,
        tokenizer: PreTrainedTokenizerBase,
        golds_B: Sequence[tuple[str, str, str]],
        begun_B: Sequence[list[int]],
    ) -> None:
        self.grader, self.tokenizer = grader, tokenizer
        self.golds_B, self.begun_B = golds_B, begun_B
        self.waiting: list[tuple[int, list[int], str]] = []
        self.submitted: list[tuple[list[int], list[str], Future[list[Verdict]]]] = []
        self.since = time.monotonic()

    def on_ended(self, row: int, token_ids: Sequence[int], reason: str) -> None:
        """Queue a completion that has ended; submit the queue at most once every EARLY_SECONDS."""
        self.waiting.append((row, [*self.begun_B[row], *token_ids], reason))
        if time.monotonic() - self.since >= EARLY_SECONDS:
            rows, ids, reasons = map(list, zip(*self.waiting, strict=True))
            self.waiting.clear()
            self.submit(rows, decode(ids, reasons, self.tokenizer), reasons)
            self.since = time.monotonic()

    def submit(self, rows: list[int], texts: list[str], reasons: list[str]) -> None:
        """Submit these completions to the grader."""
        answers = [
            Answer(verifier, text, gold, reason == "length", prompt)
            for (verifier, gold, prompt), text, reason in zip(
                [self.golds_B[row] for row in rows], texts, reasons, strict=True
            )
        ]
        self.submitted.append((rows, texts, self.grader.submit(answers)))

    def finish(self, table: pl.DataFrame, rows_B: Ints) -> pl.DataFrame:
        """Grade every remaining completion that has ended, and return the table with the verdicts.
        The completions of the request are in the rows `rows_B`."""
        known = {row for rows, _, _ in self.submitted for row in rows}
        has_ended = (table["reason"][rows_B] != UNFINISHED).to_list()
        rest = [row for row, ended in enumerate(has_ended) if ended and row not in known]
        if rest:
            samples = samples_of(table[rows_B[rest]])
            self.submit(rest, decode_samples(samples, self.tokenizer), samples.finish_reasons)
        columns = {name: table[name].to_list() for name in ("text", "outcome", "reward", "scores")}
        for rows, texts, verdicts in self.submitted:
            for row, text, verdict in zip(rows_B[rows], texts, verdicts.result(), strict=True):
                columns["text"][row], columns["outcome"][row] = text, verdict.outcome
                columns["reward"][row] = verdict.reward
                columns["scores"][row] = json.dumps(dict(verdict.parts))
        return with_values(table, columns)


def samples_of(table: pl.DataFrame) -> Samples:
    """Return rollouts in the format of an engine's samples."""
    masked = table["is_action"].null_count() < len(table)
    return Samples(
        table["token_ids"].to_list(),
        table["logprobs"].to_list(),
        table["reason"].to_list(),
        table.select(OWN_TOKENS).to_series().to_list() if masked else None,
        table["versions"].to_list(),
    )


def decode_samples(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each completion. In a conversation, every turn and every reply starts on a
    new line, so that two numbers cannot run together."""
    if samples.is_action is None:
        return decode(samples.token_ids, samples.finish_reasons, tokenizer)
    texts = []
    rows = zip(samples.token_ids, samples.is_action, samples.finish_reasons, strict=True)
    for token_ids, own, reason in rows:
        turns = turns_of(own)
        ends = [(start, start + length) for start, length in turns]
        replies = [(end, start) for (_, end), (start, _) in itertools.pairwise(ends)]
        parts = sorted([*ends, *replies])
        # every turn but the last ended with a stop token; a reply has none
        reasons = ["stop" if part in ends[:-1] else "length" for part in parts[:-1]] + [reason]
        decoded = decode([token_ids[slice(*part)] for part in parts], reasons, tokenizer)
        texts.append("\n".join(text.strip("\n") for text in decoded))
    return texts
