"""Rollouts of a fixed policy, sampled through the store, for `profile`, `baseline` and `evaluate`.

Only rollouts that the store lacks are sampled. The costs are sums over the rows *used*, no matter
which run sampled them, so a warm store never makes profiling look free.

Texts pass through memory one shard at a time. Only the keys and costs of a rollout stay in memory:
a few dozen bytes."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.accounting.ledger import Ledger, charged_flops
from tasks.common.artifacts import STORE, Layout
from tasks.common.files import ArtifactError, digest
from tasks.common.processes.locks import exclusive
from tasks.engines.devices import held, sampling_gpus
from tasks.engines.settings import EngineSettings, Sampling
from tasks.models.policy import Policy, load_tokenizer
from tasks.models.prompts import encode_prompts
from tasks.store.folder import open_store, prompt_digest
from tasks.store.sampling import Sampler, fill_store
from tasks.store.settings import StoreSettings
from tasks.store.shards import KEYS
from tasks.store.usage import Usage, explain, last_note, write_note
from tasks.store.view import StoreView

logger = logging.getLogger(__name__)

COSTS = ["prompt_tokens", "completion_tokens", "flops", "seconds"]
# the columns that grading and costs need
VALUES = ["text", "finish_reason", *COSTS]
PART_BYTES = 32 * 2**20  # approximate size of the text that is yielded at a time
BYTES_PER_TOKEN = 4  # of text, roughly


@dataclass(frozen=True)
class SamplerSettings:
    """The sections that sampling through the store reads."""

    sampling: Sampling
    engine: EngineSettings
    store: StoreSettings


class StoredRollouts:
    """`num_samples` rollouts per prompt, or fewer if they are requested in stages (`narrow`).
    `parts` samples the rollouts that the store lacks, and yields all of them. Then `costs` returns
    their costs, and `usage` counts reused and new ones.

    A rollout is identified by its `row`: rows are numbered prompt by prompt in the order of
    `prompts`, and within a prompt by sample index, with `num_samples` numbers for every prompt.
    Prompts of equal text share samples."""

    def __init__(
        self,
        prompts: pl.DataFrame,
        policy: Policy,
        num_samples: int,
        settings: SamplerSettings,
        layout: Layout,
        *,
        cell: str,
        greedy: bool,
    ) -> None:
        """Prepare a request, at temperature 0 if `greedy`. `cell` is the stage's name in DVC."""
        check_prompts(prompts)
        sampling = (
            replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=0, seed=0)
            if greedy
            else settings.sampling
        )
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        encoded = encode_prompts(prompts, tokenizer, policy, sampling.max_tokens)
        digests = [prompt_digest(ids) for ids in encoded]
        by_digest = dict(zip(digests, encoded, strict=True))
        if len(by_digest) == 1 and prompts["prompt"].n_unique() > 1:
            raise ArtifactError(
                f"all {len(prompts)} prompts encode to the same tokens: check whether the policy's "
                "chat template writes the user's message, and whether the tokenizer is its own"
            )
        self.sampler = Sampler(
            policy, tokenizer, sampling, settings.engine, settings.store, by_digest
        )
        key = asdict(sampling) | settings.engine.altering
        store = open_store(settings.store, layout, policy.digest, key)
        self.view = StoreView(store, rollout_keys(digests, range(num_samples)))
        self.prompts = prompts.select("prompt_id", "prompt", "answer", "verifier").with_columns(
            prompt_digest=pl.Series(digests),
            first_row=pl.int_range(pl.len(), dtype=pl.UInt32) * num_samples,
        )
        self.open, self.num_before = self.prompts, 0  # distinct rollouts of earlier views
        self.num_rows = self.num_requested = len(prompts) * num_samples
        self.rows_per_part = num_samples * max(
            PART_BYTES // (BYTES_PER_TOKEN * sampling.max_tokens * num_samples), 1
        )
        self.layout = layout
        self.cell = cell
        self.kind = "greedy" if greedy else "sampled"
        self.request = {
            "policy": policy.digest,
            "sampling": key,
            "num_samples": num_samples,
            "location": settings.store.location,
        }
        self.last = last_note(layout, cell, self.kind)
        self.usage = Usage(0, 0, 0, 0.0, "")
        self.columns = {
            name: np.zeros(
                self.num_rows, np.float64 if STORE.columns[name] == pl.Float64 else np.int32
            )
            for name in COSTS
        }
        self.is_used = np.zeros(self.num_rows, np.bool_)

    def narrow(self, is_open: npt.NDArray[np.bool_], samples: range) -> None:
        """Let the next call of `parts` yield only these `samples` of the prompts in `is_open`."""
        self.open = self.prompts.filter(pl.Series(is_open))
        self.num_before += len(self.view.keys) * bool(self.is_used.any())
        keys = rollout_keys(self.open["prompt_digest"], samples)
        self.view = StoreView(self.view.store, keys)
        self.num_requested = int(self.is_used.sum()) + len(self.open) * len(samples)

    def parts(self, on_sampled: Callable[[pl.DataFrame], object]) -> Iterator[pl.DataFrame]:
        """Sample the missing rollouts, then yield each of them once, in parts and in any order:
        `row`, the prompt's `prompt_id`, `prompt`, `answer` and `verifier`, and the store's keys and
        VALUES.

        Call `on_sampled` with the same columns of every batch as soon as it is stored. If reading
        finds a damaged shard, sample its rollouts again."""
        while len(self.view.unread):
            self.sample(lambda rows: on_sampled(self.of_prompts(rows.select(*KEYS, *VALUES))))
            for shard in self.view.parts(VALUES):
                for rows in slices(self.of_prompts(shard)):
                    places = rows["row"].to_numpy()
                    self.is_used[places] = True
                    for name, values in self.columns.items():
                        values[places] = rows[name].to_numpy()
                    yield rows
        logger.info("%s", self.usage.summary)

    def sample(self, on_sampled: Callable[[pl.DataFrame], object]) -> None:
        """Sample the missing rollouts, with locks on the GPUs and on this policy and parameters, so
        that a second process finds the rollouts of the first."""
        view = self.view
        store = self.layout.locks / f"sampling-{digest(view.store.folder)}"
        with (
            exclusive(store, "the rollouts of this policy"),
            held(sampling_gpus(self.sampler.engine)),
        ):
            view.store.tidy()
            missing = view.missing(view.keys)
            if len(missing):
                damaged = len(view.store.damaged)  # set aside by this stage, not long ago
                why = "further samples of open prompts"
                if not self.num_before:
                    why = explain(self.last, self.request, view.prompts(), missing, damaged)
                logger.info("sampling %d of %d rollouts: %s", len(missing), len(view.keys), why)
                logs = self.layout.engine_logs(self.cell)
                done = fill_store(view, missing, self.sampler, on_sampled, logs)
                self.usage += replace(done, why=why)
        reused = max(self.num_before + len(view.keys) - self.usage.sampled_rollouts, 0)
        self.usage = replace(self.usage, reused_rollouts=reused)
        write_note(self.layout, self.cell, self.kind, self.request, self.usage.summary)

    def of_prompts(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return store rows with their prompts. A row is repeated for prompts of equal text."""
        known = rows.join(self.open, on="prompt_digest", how="inner", maintain_order="left")
        return known.with_columns(row=pl.col("first_row") + pl.col("sample_index").cast(pl.UInt32))

    def costs(self) -> pl.DataFrame:
        """Return the COSTS of all rollouts that were yielded, in the order of their rows."""
        return pl.DataFrame(self.columns).filter(pl.Series(self.is_used))


def check_prompts(prompts: pl.DataFrame) -> None:
    """Raise ArtifactError if there are no prompts, or a prompt_id is duplicated."""
    if prompts.is_empty():
        raise ArtifactError(
            "there are no prompts: see prompts/rejected.parquet for those that ingest rejected"
        )
    if prompts["prompt_id"].is_duplicated().any():
        raise ArtifactError(
            "a prompt_id is duplicated in the prompts: run `python -m tasks.ingest` again"
        )


def slices(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield `rows` in slices of about PART_BYTES of text."""
    num_bytes = int(rows["text"].str.len_bytes().sum())
    yield from rows.iter_slices(max(len(rows) * PART_BYTES // max(num_bytes, PART_BYTES), 1))


def read_tokens(
    prompts: pl.DataFrame,
    policy: Policy,
    num_samples: int,
    settings: SamplerSettings,
    layout: Layout,
) -> pl.DataFrame:
    """Return a table (`prompt_id`, `sample_index`, `token_ids`, `logprobs`) of `num_samples`
    rollouts per prompt. Rollouts that the store lacks are omitted."""
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    encoded = encode_prompts(prompts, tokenizer, policy, settings.sampling.max_tokens)
    digests = [prompt_digest(ids) for ids in encoded]
    key = asdict(settings.sampling) | settings.engine.altering
    store = open_store(settings.store, layout, policy.digest, key)
    rows = StoreView(store, rollout_keys(digests, range(num_samples))).read(
        ["token_ids", "logprobs"]
    )
    identified = prompts.select("prompt_id").with_columns(prompt_digest=pl.Series(digests))
    return identified.join(rows, on="prompt_digest", how="inner").drop("prompt_digest")


def rollout_keys(digests: Iterable[str], samples: range) -> pl.DataFrame:
    """Return the store's keys for these `samples` of each distinct prompt."""
    indices = pl.DataFrame({"sample_index": samples}, schema={"sample_index": pl.Int32})
    return pl.DataFrame({"prompt_digest": list(dict.fromkeys(digests))}).join(indices, how="cross")


def sampling_cost(rows: pl.DataFrame, policy: Policy, phase: str, *, charged: bool) -> Ledger:
    """Return the ledger of store rows: the FLOPs that were executed and, if `charged`, two per
    parameter and token in the accounts of charged FLOPs."""
    ledger = Ledger()
    token_sums = rows.select(pl.col("prompt_tokens", "completion_tokens").cast(pl.Int64).sum())
    tokens = float(token_sums.sum_horizontal().item())
    charge = charged_flops(policy.architecture, generated=tokens) if charged else 0.0
    # an exact sum, so that it does not depend on the order of rows in shards
    executed = math.fsum(rows["flops"])
    ledger.add(
        phase,
        executed=executed,
        charged=charge,
        charged_mixed=charge,
        charged_paper=charge,
        tokens=tokens,
        rollouts=len(rows),
    )
    return ledger
