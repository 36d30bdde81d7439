"""The tiny policy: a Qwen3 with under half a million parameters, trained here from scratch in
minutes on one core. Other settings make larger policies, in minutes on a GPU.

With it, the whole pipeline runs on any machine. It is imperfect on purpose: at temperature 1, it
solves its problems with probabilities over the whole range from 0 to 1 (see
`families/chain_sum.py`), so that profiling, allocation and reinforcement learning have an effect.
head_dim is 32, the smallest that vLLM accepts."""

import math
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from tasks.models.policy import torch_device
from tasks.policy.examples import draw, phrases
from tasks.policy.settings import Model, Tiny
from tasks.policy.tokenizer import character_tokenizer
from tasks.policy.training import encode, train
from tasks.policy.unfinished import Unfinished

HEAD_DIM = 32


def make(
    settings: Tiny, unfinished: Path | None = None, every_seconds: float = math.inf
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Train the tiny policy. Equal settings yield equal weights on one machine's CPU: training uses
    one thread and its own seeds. The file `unfinished` is a checkpoint, written every
    `every_seconds`: a killed training continues from it with the same result."""
    torch.set_num_threads(1)
    tokenizer = character_tokenizer(phrases(settings.families), settings.model.max_length)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = untrained(settings.model, tokenizer).train()
        model.to(torch_device(settings.training.device))  # type: ignore[arg-type]
        chunk = settings.training.batch_size * settings.training.batches_per_bucket
        train(
            model,
            lambda first: (
                encode(tokenizer, pairs)
                for pairs in draw(settings.families, settings.seed, chunk, first)
            ),
            settings.training,
            settings.seed,
            Unfinished(unfinished, asdict(settings), every_seconds) if unfinished else None,
        )
    return model.eval(), tokenizer


def untrained(settings: Model, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a Qwen3 with random weights for `tokenizer`."""
    tokens = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        initializer_range=0.05 * math.sqrt(128 / settings.hidden_size),  # 0.02 at 768
        dtype="float32",
        **tokens,
    )
    return Qwen3ForCausalLM(config)
