"""Small policies of real architectures with real tokenizers, saved as Hugging Face models."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel, Fuse
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tasks.common.artifacts import Layout
from tasks.common.checksums import write_checked
from tasks.engines.settings import EngineSettings
from tasks.models.folder import policy_digest
from tasks.models.lora import add_adapters
from tasks.models.policy import describe, load_model
from tasks.models.settings import Lora

ENGINE = EngineSettings(
    name="hf",
    device="cpu",
    dtype="float32",
    max_rows=64,
    memory_fraction=0.3,
    sleep=False,
    max_retries=2,
    timeout_seconds=60.0,
)

CORPUS = [
    "Janet has 3 apples and buys 4 more. How many apples does she have? #### 7",
    "12 + 30 = 42",
    "the of and to",
] * 9


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per printable character, without a start token."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {
        chr(code): code - 29 for code in range(32, 127)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def bpe_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on `corpus`, with a start token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def make_policy(
    folder: Path,
    architecture: str,
    corpus: list[str] | None = None,
    max_length: int = 512,
    num_layers: int = 2,
) -> Path:
    """Make a policy with random weights in `folder`. They are scaled up, so that its distribution
    is not uniform."""
    torch.manual_seed(0)
    shape = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": max_length,
    }
    if architecture == "qwen3":
        tokenizer = character_tokenizer()
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        }
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=98, eos_token_id=1, pad_token_id=0, **sizes, **shape)
        )
    else:
        tokenizer = bpe_tokenizer(corpus or CORPUS)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        }
        config = LlamaConfig(
            vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=0, **sizes, **shape
        )
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def place_policy(folder: Path, layout: Layout, model: torch.nn.Module) -> None:
    """Write `policy.json` for the policy in `folder`, as the stage `policy` does."""
    card = {"source": str(folder), "location": str(folder), "trust_remote_code": False}
    write_checked(layout.policy_card, {**card, "digest": policy_digest(folder), **describe(model)})


def adapted(folder: Path, modules: list[str]) -> PreTrainedModel:
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    add_adapters(model, Lora(rank=2, alpha=4.0, modules=modules, base_bits=32), 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    return model


def make_guesser(folder: Path) -> Path:
    """Train the small Qwen3 to answer any sum with a random one of the digits 6, 7, 8, so that
    groups are mixed."""
    make_policy(folder, "qwen3")
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(folder), character_tokenizer()
    optimizer, generator = (
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        torch.Generator().manual_seed(0),
    )
    prompts = [tokenizer(f"{n}{'+1' * n} =").input_ids for n in range(6)]
    for _ in range(60):
        loss = torch.zeros(())
        for prompt in prompts:
            digits = torch.randint(6, 9, (8, 1), generator=generator) + ord("0") - 29
            ids = torch.cat(
                [torch.tensor(prompt).expand(8, -1), digits, torch.ones_like(digits)], 1
            )
            logits = model(input_ids=ids).logits[:, len(prompt) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, len(prompt) :].flatten()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
