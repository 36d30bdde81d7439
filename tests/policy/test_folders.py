"""The stage policy refuses folders of external policies, and names the faulty file."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.files import ArtifactError, read_json, write_json
from tasks.models.folder import OBJECTS, check_folder, num_parameters, weight_files
from tasks.models.policy import load_model, load_tokenizer, save_trained, stop_token_ids
from tasks.policy.card import write_external
from tests.engines.conftest import load

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, llama: Path) -> Path:
    """Return a copy of a policy, for a test that damages it."""
    return Path(shutil.copytree(llama, tmp_path / "policy"))


def change(path: Path, **changes: Any) -> None:
    """Change keys of the JSON object in a file."""
    write_json(path, {**(read_json(path) if path.exists() else {}), **changes})


def check_refused(folder: Path, message: str) -> None:
    """Check that the stage refuses a policy with a message of one line, and copies nothing."""
    made = folder.parent / "made"
    with pytest.raises(ArtifactError, match=message) as raised:
        write_external(str(folder), folder, False, made)
    assert "\n" not in str(raised.value)
    assert not made.exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("pytorch_model.bin", "contains only pickled weights .pytorch_model.bin."),
        (None, "no .*safetensors"),
    ],
)
def test_folder_without_safetensors_is_refused_and_the_old_policy_stays(
    tmp_path: Path, folder: Path, weights: str | None, message: str
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("old")
    (folder / "model.safetensors").unlink()
    if weights:
        (folder / weights).write_bytes(b"cos\nsystem\n")
    with pytest.raises(ArtifactError, match=message):
        write_external(str(folder), folder, False, tmp_path / "old")
    assert (tmp_path / "old" / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((2**62).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        (None, r"is .* damaged \(.*incomplete"),
    ],
)
def test_damaged_weights_are_named(folder: Path, content: bytes | None, message: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] if content is None else content)
    check_refused(folder, f"model.safetensors {message}")


DEEP = "[" * 100_000 + "]" * 100_000
CODE = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
EMPTY = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, DEEP, f"{name} is not JSON") for name in OBJECTS),
        ("model.safetensors.index.json", DEEP, "index.json is not JSON"),
        ("model.safetensors.index.json", '{"weight_map": ["model"]}', "has no weight_map"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer.json", "", "tokenizer.json is not JSON"),
        ("tokenizer.json", EMPTY, "tokenizer.json: the tokenizer has no tokens for text"),
        ("config.json", {"num_attention_heads": 0}, "config.json describes cannot be loaded"),
        ("config.json", {"model_type": "x"}, "config.json describes cannot be loaded"),
        ("config.json", '{"model_type": "bloom"}', "BloomForCausalLM is not supported .*max_pos"),
        ("config.json", '{"model_type": "gemma4_text"}', "Gemma4ForCausalLM is .*per-layer attr"),
        ("config.json", {"model_type": "x", "auto_map": CODE}, "config.json names Python code"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
            "tokenizer_config.json names Python code",
        ),
        ("config.json", {"quantization_config": "x"}, "quantization_config is not a JSON object"),
        ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json: eos_token_id"),
        # a configuration of another model is refused before memory is allocated
        ("config.json", {"vocab_size": 10**9}, r"lm_head.weight has shape .* requires \(10{9},"),
        ("adapter_config.json", {"base_model_name_or_path": "x"}, "merge it into its base model"),
    ],
)
def test_file_that_cannot_be_loaded_is_named(
    folder: Path, name: str, content: str | dict[str, Any], message: str
) -> None:
    if isinstance(content, str):
        (folder / name).write_text(content)
    else:
        change(folder / name, **content)
    check_refused(folder, message)


def test_policy_without_a_tokenizer_is_refused(folder: Path) -> None:
    """The other files are not enough: transformers would invent three tokens."""
    (folder / "tokenizer.json").unlink()
    check_refused(folder, f"{folder} has no tokenizer .*copy the tokenizer's")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "x"}, "config.json: transformers does not support the quantisation 'x'"),
        ({"bits": 4}, "config.json describes cannot be loaded .*quant_method"),
        ({"quant_method": "gptq", "bits": 4}, "config.json describes cannot be loaded"),
    ],
)
def test_unsupported_quantisation_is_named(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    change(folder / "config.json", quantization_config=settings)
    with pytest.raises(ArtifactError, match=message):
        load(folder)


def split(folder: Path, last: Any = "part-1.safetensors") -> Path:
    """Split the weights into two files. The index has the last tensor in the file `last`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    *others, end = sorted(weights)
    parts = {"part-0.safetensors": others[::2], "part-1.safetensors": [*others[1::2], end]}
    for part, inside in parts.items():
        save_file({name: weights[name] for name in inside}, folder / part)
    places = {name: part for part, inside in parts.items() for name in inside} | {end: last}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "own.safetensors.index.json"])
def test_split_weights_are_loaded(folder: Path, llama: Path, index: str) -> None:
    shutil.copy(llama / "model.safetensors", folder / "consolidated.safetensors")  # not loaded
    (split(folder) / "model.safetensors.index.json").rename(folder / index)
    if index.startswith("own"):
        change(folder / "config.json", transformers_weights=index)
    parts = load(folder).state_dict()
    assert all(torch.equal(parts[name], each) for name, each in load(llama).state_dict().items())
    assert weight_files(folder) == sorted(folder.glob("part-*"))
    assert num_parameters(folder) == num_parameters(llama)


@pytest.mark.parametrize(
    "place", ["w.bin", "../outside.safetensors", "sub/w.safetensors", "gone.safetensors", "", None]
)
def test_index_can_only_name_safetensors_beside_it(folder: Path, llama: Path, place: Any) -> None:
    """The digest would not cover other files, and they could be pickled."""
    split(folder, last=place)
    for name in ("w.bin", "../outside.safetensors", "sub/w.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(llama / "model.safetensors", folder / name)
    check_refused(folder, r"index\.json: .* can only name \*\.safetensors files")


@pytest.mark.parametrize("name", ["adapter_model.bin", "../w.safetensors", "none.safetensors"])
def test_configuration_can_only_name_safetensors_beside_it(folder: Path, name: str) -> None:
    (folder.parent / "w.safetensors").write_bytes(b"")
    (folder / "adapter_model.bin").write_bytes(b"")
    change(folder / "config.json", transformers_weights="model.safetensors")
    load(folder)
    change(folder / "config.json", transformers_weights=name)
    with pytest.raises(ArtifactError, match="transformers_weights is"):
        load(folder)


@pytest.mark.parametrize("written", [None, {"temperature": 0.6}, {"eos_token_id": [0, 7]}])
def test_trained_policy_reads_and_stops_as_the_initial_one(folder: Path, written: Any) -> None:
    """transformers would change how this tokenizer encodes text after a special token, write the
    stop token of config.json, and refuse a temperature without `do_sample`."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3}
    change(folder / "tokenizer.json", model={"type": "BPE", "vocab": vocabulary, "merges": []})
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", legacy=True)
    change(folder / "config.json", eos_token_id=5, transformers_version="4.57.1")
    (folder / "generation_config.json").unlink()
    (folder / "notes.json").mkdir()  # not a file of the policy
    if written:
        change(folder / "generation_config.json", **written)
    tokenizer, trained = load_tokenizer(folder), folder / "trained"
    save_trained(load(split(folder)), folder, trained)
    assert stop_token_ids(trained, tokenizer) == stop_token_ids(folder, tokenizer)
    assert load_tokenizer(trained)("</s>a").input_ids == tokenizer("</s>a").input_ids
    assert load(trained).state_dict().keys() == load(folder).state_dict().keys()
    assert read_json(trained / "config.json")["transformers_version"] == "4.57.1"


def test_missing_tensor_is_an_error(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[UP]
    save_file(weights, folder / "model.safetensors")
    message = f"its files have no {UP}: they would be random"
    with pytest.raises(ArtifactError, match=message):
        load(folder)
    check_refused(folder, message)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(folder: Path, wrong: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[UP][3, 4] = wrong
    save_file(weights, folder / "model.safetensors")
    check_refused(folder, f"{UP} contains NaN or infinity")


def test_a_missing_gpu_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArtifactError, match="engine.device is cuda, but torch finds no GPU: set"):
        load_model(folder, dtype=torch.float32, device=torch.device("cuda"))


def test_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder.parent / "secret").write_text("root:")
    (folder / "alias.txt").symlink_to("config.json")
    check_folder(folder)
    (folder / "notes.txt").symlink_to("../secret")
    check_refused(folder, r"notes\.txt is a link to .*secret, outside")
