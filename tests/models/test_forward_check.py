"""The check that no argument of a model's attention is ignored."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen2MoeConfig,
)

from tasks.common.files import ArtifactError
from tasks.models.forward_check import check_forward
from tasks.models.packing import forward_rows, head_logits
from tests.models.test_packing import EXPERTS, GROUPED, make

# models whose attention has sinks, or a cap that their scores reach
WITH_EXTRAS = {
    "gpt_oss": GptOssConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "gemma2": Gemma2Config(**GROUPED, attn_logit_softcapping=0.5, sliding_window=6),
}


@pytest.mark.parametrize("window", [3, 4096])
def test_window_that_packed_attention_does_not_get_is_refused(window: int) -> None:
    """The window is in transformers' masks only."""
    config = Qwen2MoeConfig(
        **GROUPED,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=2,
    )
    model = make(config)
    with pytest.raises(
        ArtifactError,
        match=f"Qwen2MoeForCausalLM has an attention window of {window} tokens, which would be "
        "ignored here: set engine.name to vllm and learner.share_prompts to false",
    ):
        check_forward(model, packed=True)
    check_forward(model, packed=False)  # by transformers' masks
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == window


@pytest.mark.parametrize("num_layers", [4, 30])
def test_a_fault_is_told_from_the_rounding_of_bfloat16(num_layers: int) -> None:
    """No healthy model is refused; a window in transformers' masks only is found."""
    deep = {**GROUPED, "num_hidden_layers": num_layers}
    for seed in range(10):
        healthy = make(LlamaConfig(**deep), seed).to(torch.bfloat16)
        for packed in (True, False):
            check_forward(healthy, packed=packed)
    config = Qwen2MoeConfig(
        **deep,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=num_layers,
    )
    with pytest.raises(ArtifactError, match="attention window of 6 tokens"):
        check_forward(make(config).to(torch.bfloat16), packed=True)


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_rows_have_the_sinks_and_caps_of_the_model_and_packed_rows_are_refused(name: str) -> None:
    model = make(WITH_EXTRAS[name])
    check_forward(model, packed=False)
    with pytest.raises(ArtifactError, match="has (s_aux|softcap) in its attention"):
        check_forward(model, packed=True)
    ids = torch.randint(2, 61, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[1, 11:] = 0
    with torch.no_grad():
        found = head_logits(model, forward_rows(model, ids).last_hidden_state)
        model.set_attn_implementation("eager")
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("packed", [True, False])
def test_model_without_a_usable_body_is_refused(packed: bool) -> None:
    config = Llama4TextConfig(
        **GROUPED,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=6,
    )
    message = "Llama4ForCausalLM computes something that is not supported here: it cannot"
    with pytest.raises(ArtifactError, match=message):
        check_forward(make(config), packed=packed)
