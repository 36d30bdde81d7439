"""Rollouts of a fixed policy, sampled through the store, for `profile`, `baseline` and `evaluate`.

Only what is missing in the store is sampled, in batches that are stored as soon as they are
complete. The costs returned are sums over the rows *used*, no matter which run sampled them, so a
warm store never makes profiling look free."""

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
from tasks.store.folder import StoreSettings, StoreView, open_store, prompt_digest
from tasks.store.shards import KEYS
from tasks.store.usage import Usage, explain, read_note, write_note

logger = logging.getLogger(__name__)

# the columns that grading and costs need
VALUES = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "flops", "seconds"]
# a prompt's digest and the indices of the samples that are wanted of it
Group = tuple[str, list[int]]


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
    """Return `num_samples` rollouts a prompt, as the store's rows with their prompts' answers and
    verifiers, and the usage.

    `cell` is the stage that asks, for the note it writes (see `usage.py`)."""
    if prompts.is_empty():
        raise ArtifactError(
            "there are no prompts: see prompts/rejected.parquet for those that ingest rejected"
        )
    sampling = (
        replace(settings.sampling, temperature=0.0, top_p=1.0, top_k=0, seed=0)
        if greedy
        else settings.sampling
    )
    # the keys that are wanted: every prompt's digest with every sample index
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    encoded = encode_prompts(prompts, tokenizer, policy, sampling.max_tokens)
    digests = [prompt_digest(ids) for ids in encoded]
    by_digest = dict(zip(digests, encoded, strict=True))
    wanted = wanted_keys(digests, num_samples)
    # sample what is missing, one process at a time on a device
    sampler = Sampler(policy, tokenizer, sampling, settings.engine, settings.store, by_digest)
    store = open_store(settings.store, layout, policy.digest, asdict(sampling))
    view = StoreView(store, wanted)
    asked = {
        "policy": policy.digest,
        "sampling": asdict(sampling),
        "num_samples": num_samples,
        "location": settings.store.location,
    }
    kind = "greedy" if greedy else "sampled"
    device = torch_device(settings.engine.device).type
    with exclusive(layout.locks / f"device-{device}", "the device"):
        usage, sampled = complete(view, sampler, asked, read_note(layout, cell, kind))
    write_note(layout, cell, kind, asked, usage.summary)
    logger.info("%s", usage.summary)
    # prompts of equal text share their samples
    identified = prompts.select("prompt_id", "answer", "verifier").with_columns(
        prompt_digest=pl.Series(digests)
    )
    rows = identified.join(wanted, on="prompt_digest", how="left", maintain_order="left").join(
        sampled, on=KEYS, how="left", maintain_order="left"
    )
    return rows, usage


def read_tokens(
    prompts: pl.DataFrame,
    policy: Policy,
    num_samples: int,
    sampling: Sampling,
    settings: StoreSettings,
    layout: Layout,
) -> pl.DataFrame:
    """Return the tokens and log-probabilities of what the store has of `num_samples` rollouts a
    prompt, by `prompt_id` and `sample_index`."""
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    encoded = encode_prompts(prompts, tokenizer, policy, sampling.max_tokens)
    digests = [prompt_digest(ids) for ids in encoded]
    store = open_store(settings, layout, policy.digest, asdict(sampling))
    rows = StoreView(store, wanted_keys(digests, num_samples)).read(["token_ids", "logprobs"])
    identified = prompts.select("prompt_id").with_columns(prompt_digest=pl.Series(digests))
    return identified.join(rows, on="prompt_digest", how="inner").drop("prompt_digest")


def wanted_keys(digests: Sequence[str], num_samples: int) -> pl.DataFrame:
    """Return the store's keys of `num_samples` rollouts of each distinct prompt."""
    indices = pl.DataFrame({"sample_index": range(num_samples)}, schema={"sample_index": pl.Int32})
    return pl.DataFrame({"prompt_digest": list(dict.fromkeys(digests))}).join(indices, how="cross")


@dataclass(frozen=True)
class Sampler:
    """What sampling needs, with the token ids of the prompts by digest."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    engine: EngineSettings
    store: StoreSettings
    by_digest: dict[str, list[int]]


def complete(
    view: StoreView, sampler: Sampler, asked: dict[str, Any], last: Mapping[str, Any] | None
) -> tuple[Usage, pl.DataFrame]:
    """Sample what is missing and read all that is wanted; repeat when reading finds a damaged
    shard."""
    usage = Usage(0, 0, 0, 0.0, "")
    while True:
        missing = view.missing(view.wanted)
        if len(missing):
            why = explain(last, asked, view.prompts(), missing, view.store.num_damaged())
            logger.info("sampling %d of %d rollouts: %s", len(missing), len(view.wanted), why)
            usage += replace(fill_store(view, missing, sampler), why=why)
        rows = view.read(VALUES)
        if len(rows) == len(view.wanted):
            reused = max(len(rows) - usage.sampled_rollouts, 0)
            return replace(usage, reused_rollouts=reused), rows


def fill_store(view: StoreView, missing: pl.DataFrame, sampler: Sampler) -> Usage:
    """Sample the missing (prompt, sample index) pairs, one shard a batch, prompts of similar length
    together.

    Batches are taken in random order, and what another process has sampled in the meantime is left
    out. So two processes that start on the same prompts share the work, except for the batches that
    both are sampling at the same time."""
    started = time.perf_counter()
    num_rollouts = 0
    num_tokens = 0
    torch.set_num_threads(sampler.engine.threads)
    engine = load_engine(sampler.engine, sampler.policy)
    todo = batches(in_groups(missing, sampler.by_digest), sampler.store.batch_rollouts)
    random.SystemRandom().shuffle(todo)
    with progress(len(missing), f"sample ({engine.name})", "rollout") as bar:
        for batch in todo:
            still_missing = view.missing(as_keys(batch))
            bar.update(sum(len(indices) for _, indices in batch) - len(still_missing))
            if len(still_missing):
                groups = in_groups(still_missing, sampler.by_digest)
                rows = sample_batch(engine, groups, sampler, bar.update)
                view.store.append(rows)
                num_rollouts += len(rows)
                num_tokens += int(rows["completion_tokens"].sum())
    compaction.compact(view.store, at_least=compaction.AUTOMATIC_FROM)
    return Usage(0, num_rollouts, num_tokens, time.perf_counter() - started, "")


def in_groups(keys: pl.DataFrame, by_digest: Mapping[str, Sequence[int]]) -> list[Group]:
    """Group keys of the store by prompt, the longest prompts first."""
    groups = keys.group_by("prompt_digest", maintain_order=True).agg("sample_index").rows()
    return sorted(groups, key=lambda group: (-len(by_digest[group[0]]), group[0]))


def as_keys(groups: Sequence[Group]) -> pl.DataFrame:
    """The inverse of `in_groups`."""
    keys = [(name, index) for name, indices in groups for index in indices]
    return pl.DataFrame(keys, schema={key: STORE.columns[key] for key in KEYS}, orient="row")


def batches(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Batch whole groups, about `size` samples each, so that a prompt's samples share its
    prefill."""
    result: list[list[Group]] = [[]]
    for group in groups:
        if result[-1] and sum(len(indices) for _, indices in result[-1]) + len(group[1]) > size:
            result.append([])
        result[-1].append(group)
    return result


def sample_batch(
    engine: Engine, batch: Sequence[Group], sampler: Sampler, on_finished: Callable[[int], object]
) -> pl.DataFrame:
    """Return one call of the engine as rows of the store. The call's seconds are split over the
    rows in proportion to their tokens."""
    started = time.perf_counter()
    prompts = [sampler.by_digest[name] for name, _ in batch]
    counts = [len(indices) for _, indices in batch]
    keys = [(name, index) for name, indices in batch for index in indices]
    seeds = [sample_seed(sampler.sampling.seed, name, index) for name, index in keys]
    with_logprobs = sampler.store.logprobs
    request = Request(prompts, counts, seeds, sampler.sampling, with_logprobs)
    samples = engine.generate(request, on_finished)
    lengths = [len(ids) for ids in samples.token_ids]
    prompt_tokens = np.repeat([len(ids) for ids in prompts], counts)
    seconds = (time.perf_counter() - started) * np.array(lengths) / max(sum(lengths), 1)
    return pl.DataFrame(
        {
            "prompt_digest": [name for name, _ in keys],
            "sample_index": [index for _, index in keys],
            "token_ids": samples.token_ids,
            "logprobs": samples.logprobs if with_logprobs else None,
            "text": decode(samples.token_ids, samples.finish_reasons, sampler.tokenizer),
            "finish_reason": samples.finish_reasons,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": lengths,
            "flops": sample_flops(
                sampler.policy.architecture,
                [*map(len, prompts)],
                counts,
                lengths,
                engine.prefix_block,
            ),
            "seconds": seconds,
            "engine": engine.name,
            "engine_version": engine.version,
        },
        schema_overrides=dict(STORE.columns),
    )


def sampling_cost(rows: pl.DataFrame, policy: Policy, phase: str, *, charged: bool) -> Ledger:
    """Return the ledger of store rows: executed FLOPs as stored, and where `charged` 2 P T in the
    other two accounts."""
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
