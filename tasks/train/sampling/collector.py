"""Rollouts for the loop: sampled by the engine or read from a record, sharded by rank, graded."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Any

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Engine, Request, Samples, StoppableEngine, sample_seed
from tasks.engines.flops import completion_flops
from tasks.engines.settings import Sampling
from tasks.grading.background import BackgroundGrader
from tasks.models.policy import Policy, stop_token_ids
from tasks.train.data.columns import UNFINISHED, Floats, Ints, lengths_of, with_values
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.learner.ranks import Ranks
from tasks.train.sampling.grading import Early
from tasks.train.settings import TrainSettings
from tasks.train.slots import Generate, Requested

MIN_JUDGED = 1000  # answers of a run before its failure rate may stop it


@dataclass(frozen=True)
class RunContext:
    """The constant part of a run: the initial policy, the settings, this process among its ranks,
    and the seed."""

    policy: Policy
    settings: TrainSettings
    sampling: Sampling
    ranks: Ranks
    seed: int


@dataclass(frozen=True)
class Cost:
    """The cost of sampling: executed FLOPs, tokens of prompts and completions, rollouts; and the
    FLOPs of language models used as judges."""

    flops: float = 0.0
    tokens: int = 0
    rollouts: int = 0
    judged_flops: float = 0.0

    def as_account(self) -> dict[str, float]:
        """Return the cost under the ledger's names."""
        return {"executed": self.flops, "tokens": self.tokens, "rollouts": self.rollouts}

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, astuple(self), astuple(other)))


class Collector:
    """The engine and the grader of a run."""

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

    def collect(
        self,
        prompts: Prompts,
        table: pl.DataFrame,
        version: int,
        until: tuple[int, int] | None = None,
        *,
        training: bool = True,
    ) -> tuple[pl.DataFrame, Cost]:
        """Sample the unfinished rollouts of `table` from the policy after `version` updates, and
        grade them; return all rollouts of `table`, and the cost. Each rank samples and grades whole
        groups, and all ranks receive all results. Without `training`, the method in `generate` gets
        no prompt rows. For `until` see `Enough`."""
        ranks = self.run.ranks
        groups = ranks.shard(np.unique(table["group"].to_numpy()).tolist())
        is_mine_B = np.isin(table["group"].to_numpy(), groups)
        mine = table if is_mine_B.all() else table.filter(pl.Series(is_mine_B))
        request, rows_B, rows_Q = request_for(mine, self.run.sampling)
        prompt_rows = mine["prompt_row"].to_numpy()
        golds = prompts.table.select("verifier", "answer", "prompt")
        golds_B = golds[prompt_rows[rows_B]].rows()
        begun_B = mine["token_ids"][rows_B].to_list()
        early = Early(self.grader, self.tokenizer, golds_B, begun_B)
        known = prompt_rows[rows_Q] if training else None
        of_prompts = prompts.table[prompt_rows[rows_Q]]
        requested = Requested(of_prompts, known, self.tokenizer, self.stop_ids)
        enough = Enough(mine, rows_B, until, ranks) if until else None
        cost = Cost()
        if len(rows_B) and not (enough and enough.is_reached):
            samples = self.sample(request, requested, early, enough)
            check_versions(samples, version)
            mine = extended(mine, rows_B, samples, version)
            cost = self.cost(request, samples)
        mine = early.finish(mine, rows_B)
        cost = replace(cost, judged_flops=self.grader.grader.judge_flops())
        tables, costs = zip(*ranks.all_gather((mine, cost)), strict=True)
        return pl.concat(tables).sort("group", maintain_order=True), sum(costs[1:], costs[0])

    def sample(
        self, request: Request, requested: Requested, early: Early, enough: "Enough | None"
    ) -> Samples:
        """Return the samples of `request`, graded as they end."""
        if enough is None:
            requested = replace(requested, on_ended=early.on_ended)
            samples = self.generate.generate(self.engine, request, requested)
            if UNFINISHED in samples.finish_reasons:
                raise ArtifactError(f"the engine {self.engine.name} aborted a completion")
            return samples
        if not isinstance(self.engine, StoppableEngine):
            raise ParamsError(
                f"train.over_provision is above 1, but the engine {self.engine.name} cannot stop "
                "completions and continue them: set it to 1.0"
            )

        def is_enough(row: int, token_ids: Sequence[int], reason: str) -> bool:
            early.on_ended(row, token_ids, reason)
            return enough.after(row)

        return self.engine.generate_until(request, is_enough)

    def pass_rates(self, prompts: Prompts, unsampled: Rollouts) -> tuple[Floats, Cost]:
        """Sample rollouts; return the pass rates of prompts with a graded one, and the cost."""
        table, cost = self.collect(prompts, unsampled.table, version=-1, training=False)
        graded = replace(unsampled, table=table)
        graded = graded.where(~graded.is_error_B())
        size_Q = graded.sizes_Q()
        correct_Q = np.bincount(graded.group_B, graded.is_correct_B(), len(size_Q))
        return np.asarray(correct_Q[size_Q > 0] / size_Q[size_Q > 0]), cost

    def probe(self, prompts: Prompts, size: int, length: int) -> tuple[Rollouts, Cost]:
        """Return ungraded rollouts of the first `size` prompts with at most `length` tokens each,
        from this rank's engine."""
        rows_Q = np.arange(min(size, len(prompts)))
        empty = make_rollouts(rows_Q, prompts.token_ids(rows_Q), rows_Q, seed=sample_seed("probe"))
        request, rows_B, _ = request_for(empty.table, replace(self.run.sampling, max_tokens=length))
        samples = self.engine.generate(request)
        rollouts = replace(empty, table=extended(empty.table, rows_B, samples, version=-1))
        return rollouts, self.cost(request, samples)

    def cost(self, request: Request, samples: Samples) -> Cost:
        """Return the cost of sampling. Tokens written before the call were counted earlier. A
        stopped completion is not yet a rollout; a completion without tokens costs nothing."""
        lengths_B = np.array([len(ids) for ids in samples.token_ids], dtype=np.int64)
        prompts_B = np.array([len(ids) for ids in request.prompts])[request.owner_B()]
        is_new_B = (lengths_B > 0) & (request.written_B() == 0)
        tokens = int(lengths_B.sum() + prompts_B[is_new_B].sum())
        architecture, block = self.run.policy.architecture, self.engine.prefix_block
        flops = completion_flops(architecture, request, samples, block)
        return Cost(flops, tokens, len(lengths_B) - samples.finish_reasons.count("abort"))


def validation_rollouts(prompts: Prompts, num_samples: int) -> Rollouts:
    """Return rollouts of all prompts, still without tokens. Their seeds are the same in every
    validation, so that only the policy causes differences."""
    rows_Q = np.arange(len(prompts))
    group_B = np.repeat(rows_Q, num_samples)
    places = itertools.product(range(len(prompts)), range(num_samples))
    seeds = [sample_seed("validation", *place) for place in places]
    return make_rollouts(rows_Q, prompts.token_ids(rows_Q), group_B, seed=seeds)


def request_for(table: pl.DataFrame, sampling: Sampling) -> tuple[Request, Ints, Ints]:
    """Return the request for the unfinished rollouts of a table, the row of each completion, and
    the first row of each prompt in the request. Rollouts that have begun are requested one by one,
    with their tokens as part of the prompt; the other rollouts of a group share one prefill."""
    written = lengths_of(table["token_ids"])
    group_B, is_going = table["group"].to_numpy(), (table["reason"] == UNFINISHED).to_numpy()
    rows_B = np.lexsort([written == 0, group_B])  # in a group, begun rollouts come first
    rows_B = rows_B[is_going[rows_B]]
    shares = (np.diff(group_B[rows_B]) == 0) & (written[rows_B][:-1] == 0)
    starts_Q = np.flatnonzero(np.concatenate([np.ones(min(len(rows_B), 1), np.bool_), ~shares]))
    counts, rows_Q = np.diff([*starts_Q, len(rows_B)]), rows_B[starts_Q]
    texts = table.select("prompt", "token_ids")[rows_Q]
    request = Request(
        [prompt + begun for prompt, begun in texts.rows()],
        counts.tolist(),
        table["seed"][rows_B].to_list(),
        sampling,
        written=written[rows_Q].tolist() if written[rows_Q].any() else None,
    )
    return request, rows_B, rows_Q


def extended(table: pl.DataFrame, rows_B: Ints, samples: Samples, version: int) -> pl.DataFrame:
    """Return the table with the samples appended to its rows `rows_B`. They are from the policy
    after `version` updates; -1 is for samples that are not trained on."""
    lengths = [len(ids) for ids in samples.token_ids]
    versions = samples.versions if samples.versions and version >= 0 else None
    more: dict[str, list[list[Any]]] = {
        "token_ids": samples.token_ids,
        "logprobs": samples.logprobs,
        "versions": versions or [[version] * length for length in lengths],
    }
    others: dict[str, Sequence[Any]] = {"reason": samples.finish_reasons}
    if samples.is_action is not None:
        others["is_action"] = samples.is_action
    columns = {name: table[name].to_list() for name in (*more, *others)}
    for place, row in enumerate(rows_B.tolist()):
        for name in more:
            columns[name][row] += more[name][place]
        for name in others:
            columns[name][row] = others[name][place]
    return with_values(table, columns)


def check_versions(samples: Samples, version: int) -> None:
    """Raise ArtifactError if a token is from the policy after fewer than `version` updates."""
    oldest = min(itertools.chain(*(samples.versions or [])), default=version)
    if oldest < version:
        raise ArtifactError(
            f"the engine sampled from the policy after {oldest} updates instead of the one "
            f"after {version}: a server has old weights"
        )


class Enough:
    """The condition under which sampling may end before all of this rank's groups are complete: at
    least its share of `until[0]` groups must be complete, and every group in flight since step
    `until[1]` or earlier. `rows_B` are the sampled rows of `table`."""

    def __init__(
        self, table: pl.DataFrame, rows_B: Ints, until: tuple[int, int], ranks: Ranks
    ) -> None:
        num, oldest = until
        self.group_B = table["group"][rows_B].to_list()
        self.left = Counter(self.group_B)
        num_complete = table["group"].n_unique() - len(self.left)
        self.missing = len(ranks.shard(range(num))) - num_complete
        carried = table.filter(pl.col("since").is_between(0, oldest))
        self.late = {*carried["group"]} & {*self.left}

    @property
    def is_reached(self) -> bool:
        return not self.late and self.missing <= 0

    def after(self, row: int) -> bool:
        """Count sampled completion number `row` as ended; return whether sampling may end."""
        group = self.group_B[row]
        self.left[group] -= 1
        if self.left[group]:
            return False
        self.late.discard(group)
        self.missing -= 1
        return self.is_reached
