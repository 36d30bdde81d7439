"""Rollouts for the trainer: drawn by the engine (or taken from a record), shared out over ranks,
graded."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, Samples, Sampling, sample_flops, sample_seed
from tasks.grading.grader import Answer, Grader
from tasks.models.policy import Policy
from tasks.models.prompts import decode
from tasks.train.learner.ranks import Ranks
from tasks.train.rollouts import Draw, Floats, Ints, Prompts, Request, Rollouts, State

logger = logging.getLogger(__name__)

MIN_JUDGED = 1000  # answers of a run before too high a share of failures stops it


@dataclass(frozen=True)
class Cost:
    """What sampling took: executed FLOPs, tokens of prompts and completions, rollouts."""

    flops: float
    tokens: int
    rollouts: int


class Collector:
    """The engine and the grader of a run. `recorded` holds rollouts that are taken instead of
    drawing them, `in_flight` those that a kill left of a step."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        grader: Grader,
        sampling: Sampling,
        generate: Callable[[State, Engine, Draw], Samples],
        generation: State,
        ranks: Ranks,
    ) -> None:
        self.policy, self.engine, self.tokenizer, self.grader = policy, engine, tokenizer, grader
        self.sampling, self.generate, self.generation, self.ranks = (
            sampling,
            generate,
            generation,
            ranks,
        )
        self.recorded: pl.DataFrame | None = None
        self.in_flight: pl.DataFrame | None = None

    def collect(
        self,
        prompts: Prompts,
        request: Request,
        rng: np.random.Generator,
        step: int,
        first_group: int,
    ) -> tuple[Rollouts, Cost]:
        """The graded rollouts of one request; its groups are numbered from `first_group` on within
        the step."""
        counts = request.counts.tolist()
        seeds = rng.integers(0, 2**63 - 1, size=sum(counts)).tolist()
        rows = request.prompt_rows.tolist()
        draw = Draw([prompts.token_ids[row] for row in rows], counts, seeds, self.sampling, rows)
        samples = self.find_recorded(prompts, request, step, first_group) or self.draw(draw)
        group_B = np.repeat(np.arange(len(counts)), counts)
        texts, outcomes, rewards = self.verdicts(prompts, request.prompt_rows[group_B], samples)
        rewards_B = np.array(rewards)
        rollouts = Rollouts(
            request.prompt_rows, draw.prompts, group_B, samples, texts, outcomes, rewards_B
        )
        return rollouts, self.cost(draw, samples)

    def draw(self, draw: Draw) -> Samples:
        """The samples, drawn by all ranks together: whole groups are dealt out, every rank gets all
        of them back."""
        if self.ranks.size == 1:
            return self.generate(self.generation, self.engine, draw)
        ends = np.cumsum(draw.counts)
        mine = self.ranks.share(list(range(len(draw.counts))))
        part = Draw(
            [draw.prompts[group] for group in mine],
            [draw.counts[group] for group in mine],
            [
                seed
                for group in mine
                for seed in draw.seeds[ends[group] - draw.counts[group] : ends[group]]
            ],
            draw.sampling,
            None if draw.prompt_rows is None else [draw.prompt_rows[group] for group in mine],
        )
        samples = self.generate(self.generation, self.engine, part) if mine else Samples([], [], [])
        rows = list(zip(samples.token_ids, samples.logprobs, samples.finish_reasons, strict=True))
        starts = np.cumsum([0, *part.counts])
        drawn = [rows[start:end] for start, end in itertools.pairwise(starts)]
        every = [row for group in self.ranks.gather(drawn, len(draw.counts)) for row in group]
        return Samples(
            [row[0] for row in every], [row[1] for row in every], [row[2] for row in every]
        )

    def find_recorded(
        self, prompts: Prompts, request: Request, step: int, first_group: int
    ) -> Samples | None:
        """The samples of these groups of `step` from the record, if it has them. What was in flight
        is drawn again when control, whose choices may hang on what cannot be repeated to the last
        bit, now asks for other groups; ArtifactError where `recorded` has others."""
        record = self.in_flight if self.recorded is None else self.recorded
        if record is None:
            return None
        groups = range(first_group, first_group + len(request.counts))
        rows = record.filter((pl.col("step") == step) & pl.col("group").is_in(groups))
        if rows.is_empty():
            return None
        found = (
            rows.group_by("group", maintain_order=True)
            .agg(pl.first("prompt_id"), pl.len())
            .drop("group")
            .rows()
        )
        asked = [
            (prompts.ids[row], int(count))
            for row, count in zip(request.prompt_rows, request.counts, strict=True)
        ]
        if found != asked:
            message = (
                f"step {step}: the record has (prompt, rollouts) {found}, and control asks for "
                f"{asked}"
            )
            if self.recorded is not None:
                raise ArtifactError(f"{message}: it is the record of another run")
            logger.warning("%s: these rollouts are drawn again", message)
            return None
        return Samples(
            rows["token_ids"].to_list(),
            rows["sampler_logprobs"].to_list(),
            rows["finish_reason"].to_list(),
        )

    def verdicts(
        self, prompts: Prompts, rows_B: Ints, samples: Samples
    ) -> tuple[list[str], list[str], list[float]]:
        """Texts, outcomes and rewards of completions of the prompts in `rows_B`."""
        texts = decode(samples.token_ids, samples.finish_reasons, self.tokenizer)
        answers = [
            Answer(prompts.verifiers[row], text, prompts.answers[row], reason == "length")
            for row, text, reason in zip(rows_B, texts, samples.finish_reasons, strict=True)
        ]
        verdicts = self.grader.grade(self.ranks.share(answers), min_judged=MIN_JUDGED)
        graded = self.ranks.gather(
            [(verdict.outcome, verdict.reward) for verdict in verdicts], len(answers)
        )
        return texts, [outcome for outcome, _ in graded], [reward for _, reward in graded]

    def pass_rates(self, prompts: Prompts, num_samples: int) -> tuple[Floats, Cost]:
        """Pass rate of every prompt, with the same seeds every time: differences are the
        policy's."""
        num = len(prompts.ids)
        seeds = [sample_seed("validation", i, k) for i in range(num) for k in range(num_samples)]
        draw = Draw(prompts.token_ids, [num_samples] * num, seeds, self.sampling, None)
        samples = self.draw(draw)
        rows_B = np.repeat(np.arange(num), num_samples)
        _, outcomes, _ = self.verdicts(prompts, rows_B, samples)
        correct = np.bincount(rows_B, [outcome == "correct" for outcome in outcomes])
        graded = np.bincount(rows_B, [outcome != "error" for outcome in outcomes])
        return np.asarray(correct[graded > 0] / graded[graded > 0]), self.cost(draw, samples)

    def cost(self, draw: Draw, samples: Samples) -> Cost:
        """What drawing `samples` executed."""
        lengths, prompt_tokens = (
            [len(ids) for ids in samples.token_ids],
            [len(ids) for ids in draw.prompts],
        )
        flops = sample_flops(
            self.policy.architecture, prompt_tokens, draw.counts, lengths, self.engine.prefix_block
        )
        tokens = sum(lengths) + int(np.dot(prompt_tokens, draw.counts))
        return Cost(float(flops.sum()), tokens, len(lengths))
