"""Sampling of rollouts that the store lacks, in batches. A complete batch is stored at once."""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from transformers import PreTrainedTokenizerBase

from tasks.common.artifacts import STORE
from tasks.common.files import WriteError
from tasks.common.progress import progress
from tasks.engines.engine import Engine, Request, sample_seed
from tasks.engines.flops import sample_flops
from tasks.engines.loading import load_engine
from tasks.engines.settings import EngineSettings, Sampling
from tasks.models.policy import Policy
from tasks.models.prompts import decode
from tasks.store import compaction
from tasks.store.settings import StoreSettings
from tasks.store.shards import KEYS
from tasks.store.usage import Usage
from tasks.store.view import StoreView

logger = logging.getLogger(__name__)

# a prompt's digest, and the indices of its samples
Group = tuple[str, list[int]]


@dataclass(frozen=True)
class Sampler:
    """The policy and settings for sampling, and the prompts' token ids by digest."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    engine: EngineSettings
    store: StoreSettings
    by_digest: dict[str, list[int]]


def fill_store(
    view: StoreView,
    missing: pl.DataFrame,
    sampler: Sampler,
    on_sampled: Callable[[pl.DataFrame], object],
    logs: Path | None = None,
) -> Usage:
    """Sample the missing (prompt, sample index) pairs in batches of prompts of similar length.
    Store each batch, and then call `on_sampled` with its STORE rows. At the end, merge small shards
    if there are many. The logs of servers are kept under `logs`.

    Batches are sampled in random order, without samples that another process has stored meanwhile.
    So two processes that start on the same prompts share the work, except for batches that both
    sample at the same time."""
    started = time.perf_counter()
    num_rollouts = 0
    num_tokens = 0
    torch.set_num_threads(sampler.engine.threads)
    view.store.require_writable()  # before hours of sampling
    longest = max(map(len, sampler.by_digest.values())) + sampler.sampling.max_tokens
    engine = load_engine(sampler.engine, sampler.policy, longest=longest, logs=logs)
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
                on_sampled(rows)
                num_rollouts += len(rows)
                num_tokens += int(rows["completion_tokens"].sum())
    metrics = engine.metrics()
    try:
        compaction.compact(view.store, at_least=compaction.AUTOMATIC_FROM)
    except WriteError as error:  # this costs only speed: the samples are stored
        logger.warning("the store keeps its small shards: %s", error)
    return Usage(0, num_rollouts, num_tokens, time.perf_counter() - started, "", metrics)


def in_groups(keys: pl.DataFrame, by_digest: Mapping[str, Sequence[int]]) -> list[Group]:
    """Group keys of the store by prompt, the longest prompts first."""
    groups = keys.group_by("prompt_digest", maintain_order=True).agg("sample_index").rows()
    return sorted(groups, key=lambda group: (-len(by_digest[group[0]]), group[0]))


def as_keys(groups: Sequence[Group]) -> pl.DataFrame:
    """Return the keys of groups: the inverse of `in_groups`."""
    keys = [(name, index) for name, indices in groups for index in indices]
    return pl.DataFrame(keys, schema={key: STORE.columns[key] for key in KEYS}, orient="row")


def batches(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Return batches of whole groups, so that a prompt's samples share its prefill. A batch has at
    most `size` samples, unless it is a single group."""
    result: list[list[Group]] = []
    room = 0
    for group in groups:
        room -= len(group[1])
        if room < 0:
            result.append([])
            room = size - len(group[1])
        result[-1].append(group)
    return result


def sample_batch(
    engine: Engine, batch: Sequence[Group], sampler: Sampler, on_finished: Callable[[int], object]
) -> pl.DataFrame:
    """Sample a batch in one call of the engine, and return rows of the store. The call's seconds
    are split over the rows in proportion to their tokens."""
    started = time.perf_counter()
    prompts = [sampler.by_digest[name] for name, _ in batch]
    counts = [len(indices) for _, indices in batch]
    keys = [(name, index) for name, indices in batch for index in indices]
    seeds = [sample_seed(sampler.sampling.seed, name, index) for name, index in keys]
    with_logprobs = sampler.store.logprobs
    request = Request(prompts, counts, seeds, sampler.sampling, with_logprobs)
    samples = engine.generate(request, lambda *_: on_finished(1))
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
