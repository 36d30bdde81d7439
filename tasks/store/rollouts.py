"""Rollouts of a fixed policy, sampled through the store: what `profile`, `baseline` and `evaluate`
read.

Only what the store lacks is sampled, in batches that are each kept as soon as they are drawn. The
costs returned are sums over the rows *used*, whoever sampled them and when, so a warm store never
makes profiling look free."""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from transformers import PreTrainedTokenizerBase

from tasks.common.artifacts import STORE, Layout
from tasks.common.files import ArtifactError
from tasks.common.ledger import Ledger, charged_flops
from tasks.common.process import exclusive
from tasks.common.progress import progress
from tasks.engines.engine import (
    Engine,
    EngineSettings,
    Request,
    Sampling,
    load_engine,
    sample_flops,
    sample_seed,
)
from tasks.models.policy import Policy, load_tokenizer, torch_device
from tasks.models.prompts import decode, encode_prompts
from tasks.store import compaction
from tasks.store.folder import Holdings, StoreSettings, open_store, prompt_digest
from tasks.store.shards import KEYS
from tasks.store.usage import Usage, explain, read_note, write_note

logger = logging.getLogger(__name__)

VALUES = [
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "flops",
    "seconds",
]  # what grading and costs need
Group = tuple[str, list[int]]  # a prompt's digest and the indices of the samples to draw


@dataclass(frozen=True)
class SamplerSettings:
    """The sections that sampling through the store reads."""

    sampling: Sampling
    engine: EngineSettings
    store: StoreSettings


def sample_prompts(
    prompts: pl.DataFrame,
    policy: Policy,
    num_samples: int,
    settings: SamplerSettings,
    layout: Layout,
    *,
    cell: str,
    greedy: bool,
) -> tuple[pl.DataFrame, Usage]:
    """`num_samples` rollouts a prompt as the store's rows with their prompts' answers and
    verifiers, and the usage.

    `cell` is the stage that asks, for the note it leaves (see `usage.py`).
    """
    if prompts.is_empty():
        raise ArtifactError(
            "there are no prompts: see prompts/rejected.parquet for what ingest turned away"
        )
    sampling = (
        replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=0, seed=0)
        if greedy
        else settings.sampling
    )
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    encoded = encode_prompts(prompts, tokenizer, policy, sampling.max_tokens)
    digests = [prompt_digest(ids) for ids in encoded]
    by_digest = dict(zip(digests, encoded, strict=True))
    wanted = pl.DataFrame({"prompt_digest": list(by_digest)}).join(
        pl.DataFrame({"sample_index": range(num_samples)}, schema={"sample_index": pl.Int32}),
        how="cross",
    )
    sampler = Sampler(policy, tokenizer, sampling, settings.engine, settings.store, by_digest)
    holdings = Holdings(open_store(settings.store, layout, policy.digest, asdict(sampling)), wanted)
    asked = {
        "policy": policy.digest,
        "sampling": asdict(sampling),
        "num_samples": num_samples,
        "location": settings.store.location,
    }
    kind = "greedy" if greedy else "sampled"
    with exclusive(
        layout.locks / f"device-{torch_device(settings.engine.device).type}", "the device"
    ):
        usage, drawn = complete(holdings, sampler, asked, read_note(layout, cell, kind))
    write_note(layout, cell, kind, asked, usage.said)
    logger.info("%s", usage.said)
    identified = prompts.select("prompt_id", "answer", "verifier").with_columns(
        prompt_digest=pl.Series(digests)
    )
    rows = identified.join(wanted, on="prompt_digest", how="left", maintain_order="left").join(
        drawn, on=KEYS, how="left", maintain_order="left"
    )
    return rows, usage


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn with: of these prompts (token ids by digest), for this store."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    engine: EngineSettings
    store: StoreSettings
    by_digest: dict[str, list[int]]


def complete(
    holdings: Holdings, sampler: Sampler, asked: dict[str, Any], last: Mapping[str, Any] | None
) -> tuple[Usage, pl.DataFrame]:
    """Sample what the store lacks and read all that is wanted; again where a shard turns out
    damaged in reading."""
    usage = Usage(0, 0, 0, 0.0, "")
    while True:
        missing = holdings.lacking(holdings.wanted)
        if len(missing):
            why = explain(last, asked, holdings.prompts(), missing, holdings.store.num_damaged())
            logger.info(
                "%d of %d rollouts are to be sampled: %s", len(missing), len(holdings.wanted), why
            )
            usage += replace(fill_store(holdings, missing, sampler), why=why)
        drawn = holdings.read(VALUES)
        if len(drawn) == len(holdings.wanted):
            return replace(
                usage, reused_rollouts=max(len(drawn) - usage.sampled_rollouts, 0)
            ), drawn


def fill_store(holdings: Holdings, missing: pl.DataFrame, sampler: Sampler) -> Usage:
    """Sample the missing (prompt, sample index) pairs, a shard a batch, prompts of like length
    together.

    The batches come in random order, and what another process has sampled meanwhile is left out:
    two that start together on the same prompts share the work, but for what both have in hand at
    the same time."""
    started, num_rollouts, num_tokens = time.perf_counter(), 0, 0
    torch.set_num_threads(sampler.engine.threads)
    engine = load_engine(sampler.engine, sampler.policy)
    todo = batches(in_groups(missing, sampler.by_digest), sampler.store.batch_rollouts)
    random.SystemRandom().shuffle(todo)
    with progress(len(missing), f"sample ({engine.name})", "rollout") as bar:
        for batch in todo:
            lacking = holdings.lacking(as_keys(batch))
            bar.update(sum(len(indices) for _, indices in batch) - len(lacking))
            if len(lacking):
                rows = sample_batch(
                    engine, in_groups(lacking, sampler.by_digest), sampler, bar.update
                )
                holdings.store.append(rows)
                num_rollouts += len(rows)
                num_tokens += int(rows["completion_tokens"].sum())
    compaction.compact(holdings.store, at_least=compaction.MANY)
    return Usage(0, num_rollouts, num_tokens, time.perf_counter() - started, "")


def in_groups(keys: pl.DataFrame, by_digest: Mapping[str, Sequence[int]]) -> list[Group]:
    """Keys of the store prompt by prompt, longest prompts first."""
    groups = keys.group_by("prompt_digest", maintain_order=True).agg("sample_index").rows()
    return sorted(groups, key=lambda group: (-len(by_digest[group[0]]), group[0]))


def as_keys(groups: Sequence[Group]) -> pl.DataFrame:
    """The inverse of `in_groups`."""
    keys = [(name, index) for name, indices in groups for index in indices]
    return pl.DataFrame(keys, schema={key: STORE.columns[key] for key in KEYS}, orient="row")


def batches(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Whole groups, about `size` samples together: a prompt's samples share one reading of it."""
    result: list[list[Group]] = [[]]
    for group in groups:
        if result[-1] and sum(len(indices) for _, indices in result[-1]) + len(group[1]) > size:
            result.append([])
        result[-1].append(group)
    return result


def sample_batch(
    engine: Engine, batch: Sequence[Group], sampler: Sampler, on_finished: Callable[[int], object]
) -> pl.DataFrame:
    """One call of the engine as rows of the store; the call's seconds are split over the rows by
    tokens."""
    started = time.perf_counter()
    sampling, policy = sampler.sampling, sampler.policy
    prompts, counts = (
        [sampler.by_digest[name] for name, _ in batch],
        [len(indices) for _, indices in batch],
    )
    keys = [(name, index) for name, indices in batch for index in indices]
    seeds = [sample_seed(sampling.seed, name, index) for name, index in keys]
    logprobs = sampler.store.logprobs
    samples = engine.generate(
        Request(prompts, counts, seeds, sampling, with_logprobs=logprobs), on_finished
    )
    lengths = [len(ids) for ids in samples.token_ids]
    prompt_tokens = np.repeat([len(ids) for ids in prompts], counts)
    seconds = (time.perf_counter() - started) * np.array(lengths) / max(sum(lengths), 1)
    return pl.DataFrame(
        {
            "prompt_digest": [name for name, _ in keys],
            "sample_index": [index for _, index in keys],
            "token_ids": samples.token_ids,
            "logprobs": samples.logprobs if logprobs else None,
            "text": decode(samples.token_ids, samples.finish_reasons, sampler.tokenizer),
            "finish_reason": samples.finish_reasons,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": lengths,
            "flops": sample_flops(
                policy.architecture, [*map(len, prompts)], counts, lengths, engine.prefix_block
            ),
            "seconds": seconds,
            "engine": engine.name,
            "engine_version": engine.version,
        },
        schema_overrides=dict(STORE.columns),
    )


def sampling_cost(rows: pl.DataFrame, policy: Policy, phase: str, *, charged: bool) -> Ledger:
    """The ledger of store rows: executed as stored, and where `charged` 2 P T in both other
    accounts."""
    ledger = Ledger()
    tokens = float(
        rows.select(pl.col("prompt_tokens", "completion_tokens").cast(pl.Int64).sum())
        .sum_horizontal()
        .item()
    )
    charge = charged_flops(policy.architecture, generated=tokens) if charged else 0.0
    executed = math.fsum(
        rows["flops"]
    )  # exact, so that it does not depend on how the rows lay in shards
    ledger.add(
        phase,
        executed=executed,
        charged=charge,
        charged_paper=charge,
        tokens=tokens,
        rollouts=len(rows),
    )
    return ledger
