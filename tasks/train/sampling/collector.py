"""Rollouts for the loop: sampled by the engine (or taken from a record), sharded over ranks,
graded.
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Engine, Request, Samples, StoppableEngine, sample_seed
from tasks.engines.flops import completion_flops, turns_of
from tasks.engines.settings import Sampling
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer
from tasks.grading.verdict import Verdict
from tasks.models.policy import stop_token_ids
from tasks.models.prompts import decode
from tasks.train.context import RunContext
from tasks.train.learner.ranks import Ranks
from tasks.train.rollouts import Floats, Ints, Prompts, Rollouts
from tasks.train.sampling.groups import GOING, Group, Rollout, request_for, samples_of
from tasks.train.slots import Asked, Generate

MIN_JUDGED = 1000  # answers of a run before too high a share of failures stops it
EARLY_SECONDS = 0.1  # between two lists of answers that are judged while others are sampled


@dataclass(frozen=True)
class Cost:
    """What sampling took: executed FLOPs, tokens of prompts and completions, rollouts."""

    flops: float = 0.0
    tokens: int = 0
    rollouts: int = 0

    def as_account(self) -> dict[str, float]:
        """The names of the ledger."""
        return {"executed": self.flops, "tokens": self.tokens, "rollouts": self.rollouts}

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops, self.tokens + other.tokens, self.rollouts + other.rollouts
        )


@dataclass(frozen=True)
class Until:
    """When sampling may end before all groups are complete: `num` of them are, and with them all
    that were in flight in step `oldest` or before."""

    num: int
    oldest: int


class Collector:
    """The engine and the grader of a run. `recorded` holds rollouts of TRAIN_ROLLOUTS that are
    taken instead of sampling them."""

    def __init__(
        self,
        run: RunContext,
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

    def collect(
        self,
        prompts: Prompts,
        groups: Sequence[Group],
        version: int,
        sampling: Sampling | None = None,
        until: Until | None = None,
        *,
        training: bool = True,
    ) -> tuple[list[Group], Cost]:
        """The groups after sampling and grading what they lacked, from the policy after `version`
        updates, and what that took. Ranks sample whole groups each, grade them, and all of them get
        all. `sampling` replaces the run's settings; `prompts` that are not for `training` have no
        rows that methods know."""
        mine = self.run.ranks.shard(groups)
        request, rollouts, places_Q = request_for(mine, sampling or self.run.sampling)
        rows = np.array([group.prompt_row for group in mine], dtype=np.int64)
        counts_Q = np.array(request.counts, dtype=np.int64)
        prompt_rows, place_B = rows[places_Q], np.repeat(places_Q, counts_Q)
        early = self.early(prompts, rows[place_B], rollouts)
        known = prompt_rows if training else None
        asked = Asked(prompts.table[prompt_rows], known, self.tokenizer, self.stop_ids)
        if sampling not in (None, self.run.sampling):
            version = -1
        enough = Enough(mine, place_B.tolist(), until, self.run.ranks) if until else None
        cost = Cost()
        if rollouts and not (enough and enough.is_reached):
            samples = self.sample(request, asked, early, enough)
            write(rollouts, samples, version)
            cost = self.cost(request, samples)
        early.finish()
        return self.gather(mine, len(groups), cost)

    def take_recorded(
        self, prompts: Prompts, groups: Sequence[Group], found: Sequence[Sequence[Rollout]]
    ) -> tuple[list[Group], Cost]:
        """As `collect`, with the rollouts of a record in the place of those that are going."""
        pairs = self.run.ranks.shard(list(zip(groups, found, strict=True)))
        for group, rollouts in pairs:
            group.rollouts = [r for r in group.rollouts if not r.is_going] + list(rollouts)
        mine, taken = [group for group, _ in pairs], [r for _, each in pairs for r in each]
        counts, seeds = [len(each) for _, each in pairs], [rollout.seed for rollout in taken]
        request = Request([group.prompt for group in mine], counts, seeds, self.run.sampling)
        rows = np.array([group.prompt_row for group, each in pairs for _ in each], dtype=np.int64)
        self.early(prompts, rows, taken).finish()
        return self.gather(mine, len(groups), self.cost(request, samples_of(taken)))

    def gather(self, mine: list[Group], num: int, cost: Cost) -> tuple[list[Group], Cost]:
        """The `num` groups of all ranks, and what all of them took."""
        self.count_judged()
        ranks = self.run.ranks
        costs = ranks.all_gather(cost)
        return ranks.gather_shards(mine, num), sum(costs[1:], costs[0])

    def sample(
        self, request: Request, asked: Asked, early: "Early", enough: "Enough | None"
    ) -> Samples:
        """The samples of `request`, graded as they end."""
        if enough is None:
            asked = replace(asked, on_ended=early.on_ended)
            samples = self.generate.generate(self.engine, request, asked)
            if GOING in samples.finish_reasons:
                raise ArtifactError(f"the engine {self.engine.name} stopped a completion by itself")
            return samples
        if not isinstance(self.engine, StoppableEngine):
            raise ParamsError(
                f"train.over_provision is above 1, and the engine {self.engine.name} cannot stop "
                "completions and go on with them: set it to 1.0"
            )

        def is_enough(row: int, token_ids: Sequence[int], reason: str) -> bool:
            early.on_ended(row, token_ids, reason)
            return enough.after(row)

        return self.engine.generate_until(request, is_enough)

    def early(self, prompts: Prompts, rows_B: Ints, rollouts: list[Rollout]) -> "Early":
        """What grades `rollouts` of the prompts in `rows_B`."""
        golds_B = prompts.table[rows_B].select("verifier", "answer", "prompt").rows()
        return Early(self.grader, self.tokenizer, golds_B, rollouts)

    def pass_rates(self, prompts: Prompts, num_samples: int) -> tuple[Floats, Cost]:
        """Pass rate of every prompt, with the same seeds every time: differences are the
        policy's."""
        numbers = range(num_samples)
        groups = [
            Group(row, ids, [Rollout(sample_seed("validation", row, k)) for k in numbers])
            for row, ids in enumerate(prompts.token_ids(np.arange(len(prompts))))
        ]
        groups, cost = self.collect(prompts, groups, version=-1, training=False)
        outcomes = [[rollout.outcome for rollout in group.rollouts] for group in groups]
        correct = np.array([each.count("correct") for each in outcomes], dtype=np.float64)
        graded = num_samples - np.array([each.count("error") for each in outcomes])
        return np.asarray(correct[graded > 0] / graded[graded > 0]), cost

    def count_judged(self) -> None:
        """Count what language models that judge have computed, on all ranks."""
        grader = self.grader.grader
        if grader.may_judge:
            self.judged_flops += sum(self.run.ranks.all_gather(grader.judge_cost().flops))

    def take_judged(self) -> float:
        """The FLOPs of judging since this was asked last."""
        flops, self.judged_flops = self.judged_flops, 0.0
        return flops

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
    """Grades completions, also while others are sampled. `golds_B` has of each of the `rollouts`
    the verifier, the gold answer and the prompt."""

    def __init__(
        self,
        grader: BackgroundGrader,
        tokenizer: PreTrainedTokenizerBase,
        golds_B: Sequence[tuple[str, str, str]],
        rollouts: Sequence[Rollout],
    ) -> None:
        self.grader, self.tokenizer = grader, tokenizer
        self.golds_B, self.rollouts = golds_B, rollouts
        self.waiting: list[tuple[int, list[int], str]] = []
        self.submitted: list[tuple[list[int], list[str], Future[list[Verdict]]]] = []
        self.since = time.monotonic()

    def on_ended(self, row: int, token_ids: Sequence[int], reason: str) -> None:
        """Have a completion graded, together with those that end within a moment."""
        self.waiting.append((row, [*self.rollouts[row].token_ids, *token_ids], reason))
        if time.monotonic() - self.since >= EARLY_SECONDS:
            rows, ids, reasons = map(list, zip(*self.waiting, strict=True))
            self.waiting.clear()
            self.submit(rows, decode(ids, reasons, self.tokenizer), reasons)
            self.since = time.monotonic()

    def submit(self, rows: list[int], texts: list[str], reasons: list[str]) -> None:
        """Have these completions graded."""
        answers = [
            Answer(verifier, text, gold, reason == "length", prompt)
            for (verifier, gold, prompt), text, reason in zip(
                [self.golds_B[row] for row in rows], texts, reasons, strict=True
            )
        ]
        self.submitted.append((rows, texts, self.grader.submit(answers)))

    def finish(self) -> None:
        """Grade every rollout that has ended, also those that were not said to have."""
        known = {row for rows, _, _ in self.submitted for row in rows}
        rest = [row for row, r in enumerate(self.rollouts) if not r.is_going and row not in known]
        if rest:
            samples = samples_of([self.rollouts[row] for row in rest])
            self.submit(rest, decode_samples(samples, self.tokenizer), samples.finish_reasons)
        for rows, texts, verdicts in self.submitted:
            for row, text, verdict in zip(rows, texts, verdicts.result(), strict=True):
                self.rollouts[row].grade(text, verdict)


def write(rollouts: Sequence[Rollout], samples: Samples, version: int) -> None:
    """Add what was sampled from the policy after `version` updates to the rollouts; -1: of no
    version of it with the run's settings. Raises ArtifactError where a token is older."""
    for row, rollout in enumerate(rollouts):
        token_ids = samples.token_ids[row]
        versions = [version] * len(token_ids)
        if samples.versions is not None and version >= 0:
            versions = samples.versions[row]
            if versions and min(versions) < version:
                raise ArtifactError(
                    f"the engine sampled from the policy after {min(versions)} updates, which was "
                    f"to be that after {version}: a server has old weights"
                )
        rollout.token_ids += token_ids
        rollout.logprobs += samples.logprobs[row]
        rollout.versions += versions
        rollout.reason = samples.finish_reasons[row]
        if samples.is_action is not None:
            rollout.is_action = samples.is_action[row]


class Enough:
    """Whether sampling of this rank's `groups` may end (see `Until`), as rollouts of those at the
    places `place_B` do."""

    def __init__(
        self, groups: Sequence[Group], place_B: Sequence[int], until: Until, ranks: Ranks
    ) -> None:
        self.left = [sum(rollout.is_going for rollout in group.rollouts) for group in groups]
        self.place_B = place_B
        self.num = len(ranks.shard(range(until.num)))
        self.late = {
            place
            for place, group in enumerate(groups)
            if self.left[place] and 0 <= group.since <= until.oldest
        }

    @property
    def is_reached(self) -> bool:
        return not self.late and self.left.count(0) >= self.num

    def after(self, row: int) -> bool:
        """Whether it is enough once the rollout `row` has ended."""
        place = self.place_B[row]
        self.left[place] -= 1
        if not self.left[place]:
            self.late.discard(place)
        return not self.left[place] and self.is_reached


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
