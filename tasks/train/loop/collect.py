"""Rollouts for the loop: sampled by the engine (or taken from a record), sharded over ranks,
graded.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.engines.engine import (
    Engine,
    Request,
    Samples,
    sample_seed,
)
from tasks.engines.flops import completion_flops, turns_of
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer
from tasks.grading.verdict import Verdict
from tasks.models.policy import stop_token_ids
from tasks.models.prompts import decode
from tasks.train.loop.state import Run
from tasks.train.rollouts import Floats, GroupRequest, Ints, Prompts, Rollouts, mixed_versions
from tasks.train.slots import Asked, Generate

logger = logging.getLogger(__name__)

MIN_JUDGED = 1000  # answers of a run before too high a share of failures stops it
EARLY_SECONDS = 0.1  # between two lists of answers that are judged while others are sampled

Graded = tuple[list[str], list[Verdict]]  # the text of each completion, and the verdict on it


@dataclass(frozen=True)
class Cost:
    """What sampling took: executed FLOPs, tokens of prompts and completions, rollouts."""

    flops: float
    tokens: int
    rollouts: int


@dataclass(frozen=True)
class Place:
    """Where in the run a request of control stands: its step, the policy's version, each group's
    number in the step and how many rollouts the group had before."""

    step: int
    version: int
    groups: Ints
    sampled: Ints


class Collector:
    """The engine and the grader of a run. `recorded` holds rollouts that are taken instead of
    sampling them, `in_flight` those that a kill left of a step."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        generate: Generate,
        tokenizer: PreTrainedTokenizerBase,
        grader: BackgroundGrader,
    ) -> None:
        self.run, self.engine, self.generate = run, engine, generate
        self.tokenizer, self.grader = tokenizer, grader
        self.stop_ids = stop_token_ids(run.policy.folder, tokenizer)
        self.judged_flops = 0.0  # of language models that judge, until they are charged
        self.recorded: pl.DataFrame | None = None
        self.in_flight: pl.DataFrame | None = None

    def collect(
        self, prompts: Prompts, asked: GroupRequest, rng: np.random.Generator, place: Place
    ) -> tuple[Rollouts, Cost]:
        """The graded rollouts of one request of control, sampled from policy `place.version`."""
        token_ids = prompts.token_ids(asked.prompt_rows)
        if asked.prefixes is not None:
            token_ids = [ids + more for ids, more in zip(token_ids, asked.prefixes, strict=True)]
        seeds = rng.integers(0, 2**63 - 1, size=int(asked.counts.sum())).tolist()
        sampling = asked.sampling or self.run.sampling
        request = Request(token_ids, asked.counts.tolist(), seeds, sampling)
        samples = self.find_recorded(prompts, asked, place)
        if samples is None:
            samples, graded = self.sample(request, self.asked(prompts, asked.prompt_rows))
        else:
            graded = self.grade(prompts, asked.prompt_rows[request.owner_B()], samples)
        is_ours = sampling == self.run.sampling
        versions = versions_of(samples, place.version if is_ours else -1)
        rollouts = fresh_rollouts(
            asked.prompt_rows, token_ids, request.owner_B(), samples, graded, versions
        )
        return rollouts, self.cost(request, samples)

    def asked(self, prompts: Prompts, rows: Ints, *, training: bool = True) -> Asked:
        """What `generate` may know of the prompts in `rows`."""
        prompt_rows = rows if training else None
        return Asked(prompts.table[rows], prompt_rows, self.tokenizer, self.stop_ids)

    def sample(self, request: Request, asked: Asked) -> tuple[Samples, Graded]:
        """The samples of `request`, judged while others are sampled. Ranks sample whole groups
        each, judge them, and all of them get all."""
        ranks = self.run.ranks
        groups = ranks.shard(range(len(request.counts)))
        mine, asked = shard_of(request, groups), asked.take(groups)
        early = Early(self.grader, self.tokenizer, asked.prompts[mine.owner_B()])
        samples = Samples([], [], [])
        if groups:
            asked = replace(asked, on_ended=early.on_ended)
            samples = self.generate.generate(self.engine, mine, asked)
        texts, verdicts = early.finish(samples)
        self.count_judged()
        if ranks.size == 1:
            return samples, (texts, verdicts)
        # put each group's rows together, exchange the groups, and lay their rows out in order
        rows_B = list(zip(rows_of(samples), texts, verdicts, strict=True))
        ends = np.cumsum([0, *mine.counts])
        sampled = [rows_B[start:end] for start, end in itertools.pairwise(ends)]
        every = itertools.chain(*ranks.gather_shards(sampled, len(request.counts)))
        rows, all_texts, all_verdicts = zip(*every, strict=True)
        return samples_of(rows), (list(all_texts), list(all_verdicts))

    def find_recorded(self, prompts: Prompts, asked: GroupRequest, place: Place) -> Samples | None:
        """The samples at this place of the run from the record, if it has them.

        Control's choices may depend on numbers that differ in the last bit after a restart. Where
        it now asks for other groups than those in flight, they are sampled again. Raises
        ArtifactError where `recorded` has other groups.
        """
        record = self.record_of(place.step)
        if record is None:
            return None
        # the rows of a group that came with an earlier request were found then
        wanted = pl.DataFrame({"group": place.groups, "first": place.sampled, "num": asked.counts})
        rows = (
            wanted.with_columns(pl.col("group").cast(pl.Int32))
            .join(record, on="group", maintain_order="left_right")
            .filter(pl.col("sample_index").is_between("first", pl.col("first") + pl.col("num") - 1))
        )
        if rows.is_empty():
            return None
        counted = rows.group_by("group", maintain_order=True).agg(pl.first("prompt_id"), pl.len())
        found = counted.drop("group").rows()
        asked_for = list(zip(prompts.ids[asked.prompt_rows], asked.counts.tolist(), strict=True))
        if found != asked_for:
            message = (
                f"step {place.step}: the record has (prompt, rollouts) {found}, and control asks "
                f"for {asked_for}"
            )
            if self.recorded is not None:
                raise ArtifactError(f"{message}: it is the record of another run")
            logger.warning("%s: these rollouts are sampled again", message)
            return None
        is_action = rows["is_action"]
        return Samples(
            rows["token_ids"].to_list(),
            rows["sampler_logprobs"].to_list(),
            rows["finish_reason"].to_list(),
            None if is_action.has_nulls() else is_action.to_list(),
            self.recorded_versions(rows, place),
        )

    def recorded_versions(self, rows: pl.DataFrame, place: Place) -> list[list[int]] | None:
        """The versions behind the tokens of recorded rollouts, where they follow from the clock;
        else they are of the version that asks. Raises ArtifactError for older ones."""
        if not self.run.settings.in_flight_updates:
            return None
        if rows["version"].is_between(0, place.version - 1).any():
            oldest = rows["version"].to_numpy().min()
            raise ArtifactError(
                f"step {place.step}: the record has rollouts of the policy after {oldest} updates, "
                f"and this is the one after {place.version}: it is the record of another run"
            )
        known = rows.select("version", "versions", pl.col("token_ids").list.len()).rows()
        return [versions or [version] * length for version, versions, length in known]

    def record_of(self, step: int) -> pl.DataFrame | None:
        """The rollouts that the record has as fresh ones of `step`; None without a record."""
        record = self.in_flight if self.recorded is None else self.recorded
        if record is None:
            return None
        return record.filter((pl.col("step") == step) & ~pl.col("replayed"))

    def check_recorded(self, step: int, num_rollouts: int) -> None:
        """Raise ArtifactError where `recorded` has more rollouts of `step` than were asked for."""
        record = None if self.recorded is None else self.record_of(step)
        if record is not None and len(record) != num_rollouts:
            raise ArtifactError(
                f"step {step}: the record has {len(record)} rollouts, and control asks for "
                f"{num_rollouts}: it is the record of another run"
            )

    def grade(self, prompts: Prompts, rows_B: Ints, samples: Samples) -> Graded:
        """Texts and verdicts of completions of the prompts in `rows_B`, which all ranks have."""
        ranks = self.run.ranks
        texts = decode_samples(samples, self.tokenizer)
        golds = prompts.table[rows_B].select("verifier", "answer", "prompt").rows()
        answers = answers_of(golds, texts, samples.finish_reasons)
        verdicts = self.grader.submit(ranks.shard(answers)).result()
        self.count_judged()
        return texts, ranks.gather_shards(verdicts, len(answers))

    def count_judged(self) -> None:
        """Count what language models that judge have computed, on all ranks."""
        grader = self.grader.grader
        if grader.may_judge:
            self.judged_flops += sum(self.run.ranks.all_gather(grader.judge_cost().flops))

    def take_judged(self) -> float:
        """The FLOPs of judging since this was asked last."""
        flops, self.judged_flops = self.judged_flops, 0.0
        return flops

    def pass_rates(self, prompts: Prompts, num_samples: int) -> tuple[Floats, Cost]:
        """Pass rate of every prompt, with the same seeds every time: differences are the
        policy's."""
        num = len(prompts)
        seeds = [sample_seed("validation", i, k) for i in range(num) for k in range(num_samples)]
        every = np.arange(num)
        request = Request(prompts.token_ids(every), [num_samples] * num, seeds, self.run.sampling)
        samples, (_, verdicts) = self.sample(request, self.asked(prompts, every, training=False))
        rows_B = request.owner_B()
        correct = np.bincount(rows_B, [verdict.outcome == "correct" for verdict in verdicts])
        graded = np.bincount(rows_B, [verdict.outcome != "error" for verdict in verdicts])
        rates = np.asarray(correct[graded > 0] / graded[graded > 0])
        return rates, self.cost(request, samples)

    def probe(self, prompts: Prompts, num_tokens: int) -> tuple[Rollouts, Cost]:
        """One short rollout of the first prompt, from this rank's engine; it is not graded."""
        sampling = replace(self.run.sampling, max_tokens=num_tokens)
        token_ids = prompts.token_ids(np.zeros(1, dtype=np.int64))
        request = Request(token_ids, [1], [sample_seed("probe")], sampling)
        samples = self.engine.generate(request)
        rows, is_replayed = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_)
        reward = np.zeros(1)
        rollouts = Rollouts(
            rows, token_ids, rows, samples, [""], ["wrong"], reward, rows, is_replayed, [{}]
        )
        return rollouts, self.cost(request, samples)

    def cost(self, request: Request, samples: Samples) -> Cost:
        """What sampling executed. Tokens that were written before a call were counted then. A
        completion that was stopped is no rollout yet, and one that was not begun took nothing."""
        lengths_B = np.array([len(ids) for ids in samples.token_ids], dtype=np.int64)
        prompts_B = np.array([len(ids) for ids in request.prompts])[request.owner_B()]
        is_new_B = (lengths_B > 0) & (request.written_B() == 0)
        tokens = int(lengths_B.sum() + prompts_B[is_new_B].sum())
        architecture, block = self.run.policy.architecture, self.engine.prefix_block
        flops = completion_flops(architecture, request, samples, block)
        return Cost(flops, tokens, len(lengths_B) - samples.finish_reasons.count("abort"))


class Early:
    """Completions that are judged while others are sampled. `prompts_B` has the row of PROMPTS of
    each completion."""

    def __init__(
        self, grader: BackgroundGrader, tokenizer: PreTrainedTokenizerBase, prompts_B: pl.DataFrame
    ) -> None:
        self.grader, self.tokenizer = grader, tokenizer
        self.golds_B = prompts_B.select("verifier", "answer", "prompt").rows()
        self.waiting: list[tuple[int, list[int], str]] = []
        self.submitted: list[tuple[list[int], list[str], Future[list[Verdict]]]] = []
        self.since = time.monotonic()

    def on_ended(self, row: int, token_ids: Sequence[int], reason: str) -> None:
        """Have a completion judged, together with those that end within a moment."""
        self.waiting.append((row, list(token_ids), reason))
        if time.monotonic() - self.since >= EARLY_SECONDS:
            rows, ids, reasons = map(list, zip(*self.waiting, strict=True))
            self.waiting.clear()
            self.submit(rows, decode(ids, reasons, self.tokenizer), reasons)
            self.since = time.monotonic()

    def submit(self, rows: list[int], texts: list[str], reasons: list[str]) -> None:
        """Have these completions judged."""
        golds = [self.golds_B[row] for row in rows]
        answers = answers_of(golds, texts, reasons)
        self.submitted.append((rows, texts, self.grader.submit(answers)))

    def finish(self, samples: Samples) -> Graded:
        """The texts and verdicts of all, also of those that were not said to have ended."""
        known = {row for rows, _, _ in self.submitted for row in rows}
        if left := [row for row in range(len(samples.token_ids)) if row not in known]:
            rest = samples if not known else take(samples, left)
            self.submit(left, decode_samples(rest, self.tokenizer), rest.finish_reasons)
        found = {
            row: (text, verdict)
            for rows, texts, verdicts in self.submitted
            for row, text, verdict in zip(rows, texts, verdicts.result(), strict=True)
        }
        every = [found[row] for row in range(len(found))]
        return [text for text, _ in every], [verdict for _, verdict in every]


def answers_of(
    golds_B: Sequence[tuple[str, str, str]], texts: Sequence[str], reasons: Sequence[str]
) -> list[Answer]:
    """Completions as a grader takes them; of each the verifier, the gold answer and the prompt."""
    return [
        Answer(verifier, text, gold, reason == "length", prompt)
        for (verifier, gold, prompt), text, reason in zip(golds_B, texts, reasons, strict=True)
    ]


def fresh_rollouts(
    prompt_rows: Ints,
    token_ids: list[list[int]],
    group_B: Ints,
    samples: Samples,
    graded: Graded,
    versions: tuple[Ints, Ints | None],
) -> Rollouts:
    """Samples of groups, whose prompts have these rows and token ids, as fresh rollouts, with the
    `versions` of their policy (see `versions_of`)."""
    texts, verdicts = graded
    return Rollouts(
        prompt_rows,
        token_ids,
        group_B,
        replace(samples, is_action=None, versions=None),
        texts,
        [verdict.outcome for verdict in verdicts],
        np.array([verdict.reward for verdict in verdicts]),
        versions[0],
        np.zeros(len(group_B), dtype=np.bool_),
        [dict(verdict.parts) for verdict in verdicts],
        None if samples.is_action is None else np.concatenate(samples.is_action),
        versions_N=versions[1],
    )


def versions_of(samples: Samples, version: int) -> tuple[Ints, Ints | None]:
    """[B] the version of the policy behind each completion, the oldest of its tokens', and [N]
    those of the tokens, as `Rollouts` has them. They were asked of the policy after `version`
    updates, -1 where other sampling settings were asked for. Raises ArtifactError where a token is
    older."""
    lengths = np.array([len(ids) for ids in samples.token_ids], dtype=np.int64)
    if samples.versions is None or version < 0:
        return np.full(len(lengths), version), None
    versions_B = np.array([min(each, default=version) for each in samples.versions])
    if (versions_B < version).any():
        raise ArtifactError(
            f"the engine sampled from the policy after {versions_B.min()} updates, which was to be "
            f"that after {version}: a server has old weights"
        )
    versions_N = np.concatenate(samples.versions)
    return versions_B, mixed_versions(versions_B, versions_N, lengths)


def decode_samples(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each completion; of a conversation the turns and the replies between them, a line
    each: without it a number would run into the next."""
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
        found = decode([token_ids[slice(*part)] for part in parts], reasons, tokenizer)
        texts.append("\n".join(text.strip("\n") for text in found))
    return texts


def rows_of(samples: Samples) -> list[tuple[Any, ...]]:
    """What is known of each completion; None where nothing is known of any."""
    num = len(samples.token_ids)
    columns = (getattr(samples, field.name) for field in fields(Samples))
    return list(zip(*(column or [None] * num for column in columns), strict=True))


def samples_of(rows: Sequence[tuple[Any, ...]]) -> Samples:
    """The inverse of `rows_of`."""
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
    token_ids, logprobs, reasons, *more = columns
    return Samples(
        token_ids, logprobs, reasons, *(None if None in column else column for column in more)
    )


def take(samples: Samples, rows: Sequence[int]) -> Samples:
    """The samples `rows`, in that order."""
    every = rows_of(samples)
    return samples_of([every[row] for row in rows])


def shard_of(request: Request, groups: Sequence[int]) -> Request:
    """The part of `request` that asks for the prompts `groups`."""
    ends = np.cumsum(request.counts).tolist()
    seeds = [
        seed
        for group in groups
        for seed in request.seeds[ends[group] - request.counts[group] : ends[group]]
    ]
    return Request(
        [request.prompts[group] for group in groups],
        [request.counts[group] for group in groups],
        seeds,
        request.sampling,
        request.with_logprobs,
    )
