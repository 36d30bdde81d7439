"""Supervised training of the tiny policy: next-token loss on completions, in batches of similar
lengths.

Length buckets matter: without them most of a batch is padding. The loss of a batch is divided by
the *average* number of completion tokens per batch, not by the batch's own number: short
completions are in the same batch, and each of their tokens would otherwise have more weight.

On a GPU, products are in bfloat16, and weights and optimizer in float32 (autocast). On a CPU, all
numbers are in float32, and equal settings yield equal weights.

Shapes: B rows, T tokens, V vocabulary."""

import logging
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.common.progress import progress
from tasks.policy.settings import Training
from tasks.policy.unfinished import Unfinished

logger = logging.getLogger(__name__)
IGNORED = -100


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]]
) -> list[tuple[list[int], int]]:
    """Return, for every pair, the token ids of prompt, completion and end-of-sequence token, and
    the number of prompt tokens."""
    prompts, completions = (
        tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        for texts in zip(*pairs, strict=True)
    )
    return [
        ([*prompt, *completion, tokenizer.eos_token_id], len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def batches(
    rows: list[tuple[list[int], int]], batch_size: int, seed: int
) -> list[list[tuple[list[int], int]]]:
    """Return batches of rows of similar length, in random order."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    cut = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    random.Random(seed).shuffle(cut)
    return cut


def collate(rows: list[tuple[list[int], int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return tokens_BT, padded on the right, and targets_BT: the next token within completions,
    IGNORED elsewhere."""
    width = max(len(ids) for ids, _ in rows)
    tokens_BT = torch.full((len(rows), width), pad)
    targets_BT = torch.full((len(rows), width), IGNORED)
    for row, (ids, num_prompt) in enumerate(rows):
        tokens_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, num_prompt - 1 : len(ids) - 1] = torch.tensor(ids[num_prompt:])
    return tokens_BT, targets_BT


def learning_rate(settings: Training, done_rate: float) -> float:
    """Return the learning rate. It rises linearly over the first `warmup_rate` of the tokens, then
    falls linearly to 0."""
    if done_rate < settings.warmup_rate:
        return settings.learning_rate * max(done_rate, 0.01) / settings.warmup_rate
    return settings.learning_rate * (1 - done_rate) / (1 - settings.warmup_rate)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chunks: Callable[[int], Iterator[list[tuple[str, str]]]],
    settings: Training,
    seed: int,
    unfinished: Unfinished | None = None,
) -> None:
    """Train `model` in place on chunks of pairs (prompt, completion) for `settings.tokens` tokens.
    `chunks(number)` yields chunks from that number on. Training continues from the checkpoint
    `unfinished`, and updates it between chunks."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    num_chunks, done = unfinished.load(model, optimizer) if unfinished else (0, 0)
    reported, losses, stream = done, list[Tensor](), chunks(num_chunks)
    with progress(settings.tokens, "policy", "token") as bar:
        bar.update(done)
        while done < settings.tokens:
            rows = encode(tokenizer, next(stream))
            divisor = (
                settings.batch_size
                * sum(len(ids) - num_prompt for ids, num_prompt in rows)
                / len(rows)
            )
            for batch in batches(rows, settings.batch_size, seed + done):
                if done >= settings.tokens:
                    break
                losses.append(
                    step(model, optimizer, batch, divisor, settings, done / settings.tokens)
                )
                num_tokens = sum(len(ids) for ids, _ in batch)
                done += num_tokens
                bar.update(num_tokens)
            num_chunks += 1
            if unfinished:
                unfinished.save_now_and_then(model, optimizer, num_chunks, done)
            if done >= reported + settings.tokens / 20 or done >= settings.tokens:
                reported = done
                share = min(1.0, done / settings.tokens)
                logger.info(
                    "%.0f %% of the tokens: loss %.4f", 100 * share, torch.stack(losses).mean()
                )
                losses.clear()


def step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: list[tuple[list[int], int]],
    divisor: float,
    settings: Training,
    done_rate: float,
) -> Tensor:
    """Perform one optimizer step. Return the loss: its sum over completion tokens / `divisor`. It
    stays on the device, because a read would wait for the GPU. Right padding needs no mask."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, done_rate)
    device = model.device
    tokens_BT, targets_BT = (t.to(device) for t in collate(batch, model.config.pad_token_id))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    total = cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    loss = total / divisor
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return loss.detach()
