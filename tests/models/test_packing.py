"""Packed rows and the fused forward against transformers' own forward, over real architectures with
random weights."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tasks.common.files import ArtifactError
from tasks.engines.engine import Request
from tasks.engines.hf import engine as hf
from tasks.engines.hf.decoding import Slots
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models import packing
from tasks.models.forward_check import check_forward
from tasks.models.fused import FusedForward, fits
from tasks.models.packing import (
    ATTENTION,
    compile_layers,
    forward,
    forward_rows,
    head_logits,
    is_plainly_causal,
    pack,
)
from tasks.models.policy import load_model
from tests.engines.conftest import logprob_gaps
from tests.waits import Waits, num_waits

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FAMILY = {
    "llama": LlamaConfig(**GROUPED),
    "llama3 with biases": LlamaConfig(
        **GROUPED,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32},
    ),
    "llama with a window that it ignores": LlamaConfig(**GROUPED, sliding_window=6),
    "mistral": MistralConfig(**GROUPED, sliding_window=6),
    "qwen2": Qwen2Config(
        **SHAPE, num_key_value_heads=1, intermediate_size=48, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**GROUPED),
}
OTHERS = {
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt_neox": GPTNeoXConfig(**SHAPE, intermediate_size=48),
    "granite": GraniteConfig(**{**GROUPED, "logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=6),
    "olmo2": Olmo2Config(**GROUPED),
    "phi3": Phi3Config(**{**GROUPED, "bos_token_id": 1, "eos_token_id": 1}),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **EXPERTS),
}
REFUSED = {
    "bloom": BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "gemma2": Gemma2Config(**GROUPED),
    "gpt_neo": GPTNeoConfig(**SHAPE, attention_types=[[["global"], 2]]),
    "mamba": FalconMambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4),
    "qwen3_next": Qwen3NextConfig(
        **GROUPED, **EXPERTS, layer_types=["linear_attention", "full_attention"]
    ),
}


LONG = [[(7 * n + 3 * length) % 61 for n in range(length)] for length in (31, 22, 5, 13)]


def make(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter) * (0.3 if "norm" in name or "bias" in name else 0.1)
            )
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize("name", [*FAMILY, *OTHERS])
def test_packed_forward_yields_the_models_own_logits(name: str) -> None:
    model = make((FAMILY | OTHERS)[name])
    before = model.config.to_dict(), model.config._attn_implementation
    check_forward(model, packed=True)
    assert (model.config.to_dict(), model.config._attn_implementation) == before


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_packing_does_not_support_are_refused(tmp_path: Path, name: str) -> None:
    make(REFUSED[name]).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    message = "set engine.name to vllm and learner.share_prompts to false"
    with pytest.raises(ArtifactError, match=message):
        check_forward(model, packed=True)


@pytest.mark.parametrize("name", [*FAMILY, *OTHERS, *REFUSED])
def test_forward_of_rows_is_bit_identical_to_transformers(name: str) -> None:
    """Sequences are longer than the windows. Without windows the host never waits."""
    model = make((FAMILY | OTHERS | REFUSED)[name])
    ids = torch.randint(2, 61, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[1, 11:] = 0
    with torch.no_grad():
        expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with Waits() as waits:
            found = forward_rows(model, ids).last_hidden_state
    assert torch.equal(found, expected)
    if is_plainly_causal(model):
        assert waits.names == []


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gpt2", "qwen3_moe"])
def test_flash_attention_agrees_with_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and continuations, with their gradients, and of continuations of prompts without
    one. FlashAttention is replaced by its definition."""
    model = make((FAMILY | OTHERS)[name])
    owners, rests = np.array([0, 3, 0, 2, 3]), [[6] * 9, [1, 2], [3], [], [4] * 20]
    packed, _, _ = pack(LONG, owners, rests, model.device)
    names = [inspect.signature(f).parameters for f in (defined_attention, varlen.varlen_attn)]
    assert set(names[0]) <= set(names[1])
    found: list[list[torch.Tensor]] = []
    for is_flash in (False, True):
        monkeypatch.setattr(packing, "supports_flash", lambda _, is_flash=is_flash: is_flash)
        monkeypatch.setattr(varlen, "varlen_attn", defined_attention)
        model.zero_grad()
        states = forward(model, packed.ids, packed.positions, packed.attend)
        states.square().sum().backward()
        rest = packing.forward_after(model, *packed.split())
        found.append([states, rest, *(p.grad for p in model.base_model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def defined_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the attention of torch's `varlen_attn`, one sequence after another."""
    assert window_size[1] == 0
    assert enable_gqa
    assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
    parts = []
    for queries, keys in zip(cu_seq_q.unfold(0, 2, 1), cu_seq_k.unfold(0, 2, 1), strict=True):
        q, k, v = query[slice(*queries)], key[slice(*keys)], value[slice(*keys)]
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hts,shd->thd", weights, v))
    return torch.cat(parts)


MIXED = Gemma3TextConfig(
    **GROUPED, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
)


def test_compiled_layers_agree_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients. Only the first number of tokens compiles anything. One of the layers
    has a window."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setenv("CC", "ls")  # this backend needs no compiler
    plain, model = (make(MIXED) for _ in range(2))
    compile_layers(model)
    counts = []
    for rows in (LONG, [*LONG, *LONG], LONG[1:], [LONG[0]] * 5):
        packed, _, _ = pack(rows, np.zeros(0, dtype=np.int64), [], model.device)
        for each in (plain, model):
            each.zero_grad()
            forward(each, packed.ids, packed.positions, packed.attend).square().sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=2e-3, rtol=1e-4)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_layers_that_cannot_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(FAMILY["qwen2"])
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ArtifactError, match="needs a C compiler: install gcc, or set it to false"):
        compile_layers(model)
    model._no_split_modules = None
    with pytest.raises(ArtifactError, match="Qwen2ForCausalLM names no layers"):
        compile_layers(model)


@pytest.mark.parametrize("name", FAMILY)
def test_fused_forward_agrees_with_the_modules(name: str) -> None:
    model = make(FAMILY[name])
    assert fits(model)
    packing, _, _ = pack(
        [[5, 9, 3], [7, 2, 9, 4, 4, 8]], np.array([1, 0, 1]), [[6] * 9, [1, 2], [3]], model.device
    )
    fused = FusedForward(model, 128)
    with torch.no_grad():
        hidden = forward(model, packing.ids, packing.positions, packing.attend)
        expected = head_logits(model, hidden)
        found = fused.logits(fused(packing.ids, packing.positions, packing.attend))
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_unsupported_models_do_not_use_the_fused_forward() -> None:
    assert not any(fits(make(config)) for config in OTHERS.values())
    long = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not fits(make(LlamaConfig(**GROUPED, rope_parameters=long)))
    assert not fits(make(Qwen3Config(**{**GROUPED, "hidden_act": "gelu"})))


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gpt2", "qwen3_moe"])
def test_engine_decodes_like_a_plain_forward(name: str) -> None:
    model = make((FAMILY | OTHERS)[name])
    prompts, sampling = [[3, 4, 5], [9] * 11, [7, 8]], Sampling(1.0, 1.0, 0, 12, 0)
    request = Request(prompts, [3, 2, 4], list(range(9)), sampling)
    samples = HfEngine(model, [1], 4, 128).generate(request)
    assert max(gaps.max() for gaps in logprob_gaps(model, request, samples)) < 1e-4


def test_many_long_prompts_need_several_prefills(
    prefilled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3 + i] * n for i, n in enumerate((60, 1, 30, 12, 25))]
    request = Request(prompts, [2] * 5, list(range(10)), Sampling(1.0, 1.0, 0, 9, 0))
    drawn = []
    for max_tokens, batches in (
        (10**6, [[0, 1, 2, 3, 4]]),
        (45, [[0], [1, 2, 3], [4]]),  # at least one prompt
    ):
        monkeypatch.setattr(hf, "MAX_PREFILL_TOKENS", max_tokens)
        assert hf.PromptCache(prompts, np.arange(5)).batches([0, 1, 2, 3, 4]) == batches
        engine = HfEngine(make(FAMILY["qwen3"]), [1], 8, 128)
        drawn.append(engine.generate(request).token_ids)
    assert drawn[0] == drawn[1]
    assert sum(prefilled) == 2 * 128


def test_packing_by_hand() -> None:
    packing, prompts, rest = pack(
        [[1, 2], [3, 4, 5]], np.array([0, 1, 1]), [[6], [], [7, 8]], torch.device("cpu")
    )
    # the longest prompt first, then the longest continuation
    assert packing.ids.tolist() == [3, 4, 5, 1, 2, 7, 8, 6]
    assert packing.positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 2]
    assert prompts.starts.tolist() == [3, 0]
    assert rest.starts[[0, 2]].tolist() == [7, 5]
    assert rest.lengths.tolist() == [1, 0, 2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_waits_once_per_decoded_token(
    device: str, guesser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the tokens, in one copy, which is not counted as a wait on a CPU."""
    copies: list[int] = []
    copy = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return copy(tensor)

    model = load_model(guesser, dtype=torch.float32, device=torch.device(device))
    with torch.inference_mode():
        slots = Slots(model, 4, 5, Sampling(1.0, 1.0, 0, 64, 0), np.array([], dtype=np.int64))
        owners = np.array([0, 0, 1, 1])
        prefill = slots.prefill([[20, 14, 20, 3, 32], [20, 3, 32]])
        slots.start([0, 1, 2, 3], [5, 6, 7, 8], np.zeros(4, dtype=np.int64), prefill, owners)
        slots.step()  # creates the objects that are reused

        monkeypatch.setattr(torch.Tensor, "cpu", counted)

        def decode() -> None:
            for _ in range(10):
                slots.step()

        assert num_waits(decode, torch.device(device)) == (10 if device == "cuda" else 0)
    assert copies == [8] * 10  # a token and a log-probability for each of four rows
    assert slots.count.tolist() == [12] * 4
