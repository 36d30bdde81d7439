"""Supervised training, of the tiny policy from scratch or of another one on demonstrations:
next-token loss on completions, in batches of similar lengths.

Length buckets matter: without them most of a batch is padding. The loss of a batch is divided by
the *average* number of completion tokens per batch, not by the batch's own number: short
completions are in the same batch, and each of their tokens would otherwise have more weight.

On a GPU, and on a CPU with the setting `autocast`, products are in bfloat16, and weights and
optimizer in float32. Otherwise, all numbers are in float32. On a CPU, equal settings yield equal
weights.

Shapes: B rows, T tokens, V vocabulary."""

import logging
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.common.progress import progress
from tasks.common.stage import StageError
from tasks.policy.settings import Training
from tasks.policy.unfinished import Unfinished

logger = logging.getLogger(__name__)
IGNORED = -100
Record = Callable[[int, float], None]  # of the loss, at a number of tokens
DIVERGED = 2.0  # times the loss at the beginning
Row = tuple[list[int], int]  # token ids of prompt and completion, and how many are the prompt's


def encode(tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]]) -> list[Row]:
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


def batches(rows: list[Row], batch_size: int, seed: int) -> list[list[Row]]:
    """Return batches of rows of similar length, in random order."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    cut = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    random.Random(seed).shuffle(cut)
    return cut


def collate(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
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
    chunks: Callable[[int], Iterator[list[Row]]],
    settings: Training,
    seed: int,
    unfinished: Unfinished | None = None,
    record: Record | None = None,
) -> int:
    """Train `model` in place on chunks of rows for `settings.tokens` tokens. `chunks(number)`
    yields chunks from that number on. Training continues from the checkpoint `unfinished`, and
    updates it between batches. `record` gets the tokens so far and the mean loss since its last
    call. Return the number of tokens. Raise StageError if the loss diverges."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    num_chunks, start, done = unfinished.load(model, optimizer) if unfinished else (0, 0, 0)
    reported, losses, curve, stream = done, list[Tensor](), list[float](), chunks(num_chunks)
    with progress(settings.tokens, "policy", "token") as bar:
        bar.update(done)
        while done < settings.tokens:
            rows = next(stream)
            divisor = (
                settings.batch_size
                * sum(len(ids) - num_prompt for ids, num_prompt in rows)
                / len(rows)
            )
            position = start
            for batch in batches(rows, settings.batch_size, seed + start):
                num_tokens = sum(len(ids) for ids, _ in batch)
                if position < done:  # the checkpoint contains it
                    position += num_tokens
                    continue
                if done >= settings.tokens:
                    break
                losses.append(
                    step(model, optimizer, batch, divisor, settings, done / settings.tokens)
                )
                position = done = done + num_tokens
                bar.update(num_tokens)
                if unfinished:
                    unfinished.save_now_and_then(model, optimizer, num_chunks, start, done)
            num_chunks, start = num_chunks + 1, done
            if done >= reported + settings.tokens / 20 or done >= settings.tokens:
                reported = done
                share = min(1.0, done / settings.tokens)
                curve.append(float(torch.stack(losses).mean()))
                logger.info("%.0f %% of the tokens: loss %.4f", 100 * share, curve[-1])
                if record:
                    record(done, curve[-1])
                check(curve, settings, unfinished)
                losses.clear()
    return done


def check(curve: list[float], settings: Training, unfinished: Unfinished | None = None) -> None:
    """Raise StageError, and delete the checkpoint, if the loss has diverged: it is not finite, or
    far above its beginning."""
    if not curve[-1] <= DIVERGED * curve[0]:
        if unfinished:
            unfinished.path.unlink(missing_ok=True)
        raise StageError(
            f"supervised training of the policy diverged: its loss went from {curve[0]:.3g} to "
            f"{curve[-1]:.3g}. Lower its learning_rate, which is {settings.learning_rate:g}"
        )


def step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: list[Row],
    divisor: float,
    settings: Training,
    done_rate: float,
) -> Tensor:
    """Perform one optimizer step. Return the loss: its sum over completion tokens / `divisor`. It
    stays on the device, because a read would wait for the GPU. Right padding needs no mask."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, done_rate)
    device, losses, pad = model.device, list[Tensor](), model.config.pad_token_id or 0
    is_mixed = settings.autocast or device.type == "cuda"
    optimizer.zero_grad()
    for part in micro_batches(batch, settings.max_tokens_per_micro_batch):
        tokens_BT, targets_BT = (t.to(device) for t in collate(part, pad))
        with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
            logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        total = cross_entropy(
            logits_BTV.float().flatten(0, 1),
            targets_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        loss = total / divisor
        loss.backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return torch.stack(losses).sum()


def micro_batches(batch: list[Row], limit: int | None) -> Iterator[list[Row]]:
    """Yield the batch, which is sorted by length, in parts of at most `limit` tokens with their
    padding, or of one row."""
    part = list[Row]()
    for row in batch:
        if part and limit is not None and (len(part) + 1) * len(row[0]) > limit:
            yield part
            part = []
        part.append(row)
    yield part
