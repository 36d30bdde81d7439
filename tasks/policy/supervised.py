"""`policy.supervised`: train a policy on demonstrations before anything is profiled.

The code of `tasks/policy/training.py` does it, as for the tiny policy. The result is an ordinary
policy; its card records the cost, which is common to all recipes, and the demonstrations."""

import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl
import torch
from transformers import PreTrainedTokenizerBase

from tasks.common.accounting.ledger import charged_flops
from tasks.common.files import digest, whole_folder
from tasks.common.stage import StageError
from tasks.ingest.candidates import Row as Demonstration
from tasks.ingest.demonstrations import demonstrations
from tasks.models.adapters import update_factor
from tasks.models.folder import policy_digest
from tasks.models.lora import add_adapters
from tasks.models.policy import (
    Policy,
    load_model,
    load_tokenizer,
    open_policy,
    save_trained,
    torch_device,
)
from tasks.models.prompts import encode_plain, encode_prompts
from tasks.models.weights import NamedWeights, load_weights
from tasks.policy.card import check_numbers
from tasks.policy.settings import Supervised
from tasks.policy.training import Record, Row, train
from tasks.policy.unfinished import Unfinished

logger = logging.getLogger(__name__)


def write_supervised(
    settings: Supervised,
    base: Path,
    card: Mapping[str, Any],
    folder: Path,
    unfinished: Path | None = None,
    every_seconds: float = math.inf,
    record: Record | None = None,
) -> dict[str, Any]:
    """Train the policy in `base`, which `card` describes, on demonstrations, and write it to
    `folder`. Return its card. The file `unfinished` is a checkpoint, written every `every_seconds`:
    a killed training continues from it with the same result. Raise the errors of `demonstrations`
    and `train`."""
    policy, found = open_policy(base, card["digest"], dict(card)), demonstrations(settings)
    is_trusted, training = policy.trust_remote_code, settings.training
    rows = encoded(found, policy, load_tokenizer(base, trust_remote_code=is_trusted))
    taught = digest([[row.question, row.solution] for row in found])
    key = {**asdict(settings), "policy": policy.digest, "demonstrations": taught}
    load = partial(load_model, base, dtype=torch.float32, trust_remote_code=is_trusted)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = load(device=torch_device(training.device))
        if training.lora is not None:
            add_adapters(model, training.lora, settings.seed)
        checkpoint = Unfinished(unfinished, key, every_seconds) if unfinished else None
        size = training.batch_size * training.batches_per_bucket
        chunks = partial(draw, rows, size, settings.seed)
        factor = update_factor(model, policy.architecture)
        num_tokens = train(model.train(), chunks, training, settings.seed, checkpoint, record)
    if training.lora is not None:
        weights, model = NamedWeights(model), load(device=torch.device("cpu"))
        load_weights(model, weights)
    with whole_folder(folder) as temporary:
        temporary.rmdir()
        save_trained(model, base, temporary)
        check_numbers(temporary)
    flops = charged_flops(policy.architecture, updated=num_tokens, update_factor=factor)
    trained = {"demonstrations": len(rows), "demonstrations_digest": taught, "flops": flops}
    own = {"digest": policy_digest(folder), "location": None}
    return {**card, **own, "supervised": {**trained, "tokens": num_tokens}}


def encoded(
    found: list[Demonstration], policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """Return the token ids of the demonstrations that fit the policy's context: the prompt as it is
    sampled, the solution, and the stop token. Raise StageError if none fits."""
    names = ("prompt", "messages", "template")
    table = pl.DataFrame(
        {name: [getattr(row, name) for row in found] for name in names},
        dict.fromkeys(names, pl.String),
    ).with_columns(prompt_id=pl.Series([f"{row.source}, line {row.line}" for row in found]))
    rows = list[Row]()
    for row, prompt in zip(found, encode_prompts(table, tokenizer, policy, 0), strict=True):
        solution = encode_plain(row.solution or "", tokenizer, add_special_tokens=False)
        ids = [*prompt, *solution, int(tokenizer.eos_token_id)]
        if len(ids) <= policy.max_length:
            rows.append((ids, len(prompt)))
    logger.info("%d of %d demonstrations fit the policy's context", len(rows), len(found))
    if not rows:
        raise StageError(
            "policy.supervised: no demonstration fits the policy's context of "
            f"{policy.max_length} tokens: use other sources"
        )
    return rows


def draw(rows: list[Row], size: int, seed: int, first: int) -> Iterator[list[Row]]:
    """Yield chunks of `size` rows without end, from the chunk with index `first` on: the rows in a
    random order, another one for each pass over them."""
    for number in count(first):
        places = [divmod(place, len(rows)) for place in range(number * size, (number + 1) * size)]
        passes = {each for each, _ in places}
        orders = {each: random.Random(f"{seed}/{each}").sample(rows, len(rows)) for each in passes}
        yield [orders[each][place] for each, place in places]
