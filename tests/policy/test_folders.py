"""The stage policy: folders of external policies that are refused, each with the file at fault."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.files import ArtifactError, read_json, write_json
from tasks.models.folder import OBJECTS, check_folder
from tasks.models.policy import load_model
from tasks.policy.card import write_external


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("pytorch_model.bin", "contains only pickled weights .pytorch_model.bin."),
        (None, "no .*safetensors"),
    ],
)
def test_a_folder_without_safetensors_is_refused_and_the_old_policy_stays(
    tmp_path, llama, weights, message
):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("old")
    bad = tmp_path / "bad"
    shutil.copytree(llama, bad, ignore=shutil.ignore_patterns("*.safetensors"))
    if weights:
        (bad / weights).write_bytes(b"cos\nsystem\n")
    with pytest.raises(ArtifactError, match=message):
        write_external(str(bad), bad, False, tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((2**62).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        (b"\x10", "is not a safetensors file"),
        ((4).to_bytes(8, "little") + b"null", "is not a safetensors file"),
        (None, r"is .* damaged \(.*incomplete"),
    ],
)
def test_weights_that_are_no_safetensors_are_named_before_they_are_loaded(
    tmp_path: Path, llama: Path, content: bytes | None, message: str
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(llama, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] if content is None else content)
    with pytest.raises(ArtifactError, match=f"model.safetensors {message}"):
        check_folder(folder)


def with_header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The bytes of a safetensors file whose header is changed."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change({name: one for name, one in header.items() if name != "__metadata__"})
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + content[8 + length :]


def overlap(tensors: dict[str, Any]) -> None:
    first = next(iter(tensors.values()))
    other = next(
        one for one in tensors.values() if one["shape"] == first["shape"] and one is not first
    )
    first["data_offsets"] = other["data_offsets"]


def negative(tensors: dict[str, Any]) -> None:
    next(iter(tensors.values()))["data_offsets"][0] = -8


@pytest.mark.parametrize("change", [overlap, negative])
def test_offsets_of_weights_that_cannot_be_are_named(
    tmp_path: Path, llama: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "bad"))
    weights = folder / "model.safetensors"
    weights.write_bytes(with_header(weights.read_bytes(), change))
    with pytest.raises(ArtifactError, match=r"model.safetensors is .* damaged \(") as raised:
        write_external(str(folder), folder, False, tmp_path / "made")
    assert "\n" not in str(raised.value)


DEEP = "[" * 100_000 + "]" * 100_000
CODE = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
EMPTY = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, DEEP, f"{name} is not JSON") for name in OBJECTS),
        ("model.safetensors.index.json", DEEP, "index.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer.json", "", "tokenizer.json is not JSON"),
        ("tokenizer.json", EMPTY, "tokenizer.json: the tokenizer has no tokens for text"),
        ("config.json", {"num_attention_heads": 0}, "config.json describes cannot be loaded"),
        ("config.json", {"num_key_value_heads": 0}, "config.json describes cannot be loaded"),
        ("config.json", {"num_attention_heads": "4"}, "config.json describes cannot be loaded"),
        ("config.json", {"model_type": "x"}, "config.json describes cannot be loaded"),
        ("config.json", {"model_type": "x", "auto_map": CODE}, "config.json names Python code"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
            "tokenizer_config.json names Python code",
        ),
        ("config.json", {"quantization_config": "x"}, "quantization_config is not a JSON object"),
        ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json: eos_token_id"),
    ],
)
def test_a_file_of_a_policy_that_cannot_be_loaded_is_named_in_one_sentence(
    tmp_path: Path, llama: Path, name: str, content: str | dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "bad"))
    path = folder / name
    known = read_json(path) if isinstance(content, dict) and path.exists() else {}
    path.write_text(content if isinstance(content, str) else json.dumps({**known, **content}))
    with pytest.raises(ArtifactError, match=message) as raised:
        write_external(str(folder), folder, False, tmp_path / "made")
    assert "\n" not in str(raised.value)


def test_a_policy_without_its_tokenizer_is_refused(tmp_path: Path, llama: Path) -> None:
    """What stands beside the tokenizer is not enough: transformers would make up three tokens."""
    folder = Path(shutil.copytree(llama, tmp_path / "bad"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=f"{folder} has no tokenizer .*copy the tokenizer's"):
        write_external(str(folder), folder, False, tmp_path / "made")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "x"}, "config.json: transformers does not support the quantisation 'x'"),
        ({"bits": 4}, "config.json describes cannot be loaded .*quant_method"),
        ({"quant_method": "gptq", "bits": 4}, "config.json describes cannot be loaded"),
    ],
)
def test_a_quantisation_that_cannot_be_loaded_is_named(
    tmp_path: Path, llama: Path, settings: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "bad"))
    config = {**read_json(folder / "config.json"), "quantization_config": settings}
    write_json(folder / "config.json", config)
    with pytest.raises(ArtifactError, match=message):
        load(folder)


def sharded(folder: Path, llama: Path, last: Any = "part-1.safetensors") -> Path:
    """A copy of the policy whose weights are in two files; the index has its last tensor in the
    file `last`."""
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(llama / "model.safetensors")
    names = sorted(weights)
    *others, end = names
    parts = {"part-0.safetensors": others[::2], "part-1.safetensors": [*others[1::2], end]}
    for part, inside in parts.items():
        save_file({name: weights[name] for name in inside}, folder / part)
    places = {name: part for part, inside in parts.items() for name in inside} | {end: last}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder


def load(folder: Path) -> Any:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_an_index_that_names_its_neighbours_is_loaded(tmp_path, llama):
    whole, parts = load(llama), load(sharded(tmp_path / "policy", llama))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "place", ["w.bin", "../outside.safetensors", "sub/w.safetensors", "gone.safetensors", "", None]
)
def test_an_index_names_nothing_but_safetensors_beside_it(tmp_path, llama, place):
    """Otherwise their content would change what is loaded and not the digest, and could be a
    pickle."""
    folder = sharded(tmp_path / "policy", llama, last=place)
    for name in ("w.bin", "../outside.safetensors", "sub/w.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(llama / "model.safetensors", folder / name)
    with pytest.raises(ArtifactError, match=r"index\.json: .* can only name \*\.safetensors files"):
        write_external(str(folder), folder, False, tmp_path / "made")


def test_an_index_or_a_configuration_that_is_something_else_is_refused(tmp_path, llama):
    folder = sharded(tmp_path / "policy", llama)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model"]}')
    with pytest.raises(ArtifactError, match="has no weight_map"):
        check_folder(folder)
    (folder / "config.json").write_text("[]")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactError, match=r"config\.json is not a JSON object"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["adapter_model.bin", "../w.safetensors", "none.safetensors"])
def test_a_configuration_leads_the_loader_nowhere_else(tmp_path, llama, name):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    (tmp_path / "w.safetensors").write_bytes(b"")
    (folder / "adapter_model.bin").write_bytes(b"")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "transformers_weights": "model.safetensors"})
    assert load(folder).num_parameters() == load(llama).num_parameters()
    write_json(folder / "config.json", {**config, "transformers_weights": name})
    with pytest.raises(ArtifactError, match="transformers_weights is"):
        load(folder)


def test_an_adapter_is_refused_because_its_base_model_is_elsewhere(tmp_path, llama):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": str(llama)})
    with pytest.raises(ArtifactError, match=r"merge it into its base model"):
        check_folder(folder)


def test_a_tensor_that_is_missing_is_an_error_and_not_random(tmp_path, llama):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"its files have no {name}: they would be random"):
        load(folder)
    with pytest.raises(ArtifactError, match=f"its files have no {name}: they would be random"):
        write_external(str(folder), folder, False, tmp_path / "copied")


def test_a_configuration_of_another_model_is_refused_before_memory_is_taken(tmp_path, llama):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vocab_size": 10**9})
    with pytest.raises(ArtifactError, match=r"lm_head.weight has shape .* requires \(10{9},"):
        write_external(str(folder), folder, False, tmp_path / "copied")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_numbers_are_refused(tmp_path, llama, wrong):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][3, 4] = wrong
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"{name} contains NaN or infinity"):
        write_external(str(folder), folder, False, tmp_path / "copied")
    assert not (tmp_path / "copied").exists()


def test_a_link_that_leaves_the_folder_is_refused_and_nothing_is_copied(tmp_path, llama):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    (tmp_path / "secret").write_text("root:")
    (folder / "alias.txt").symlink_to("config.json")
    check_folder(folder)
    (folder / "notes.txt").symlink_to("../secret")
    with pytest.raises(ArtifactError, match=r"notes\.txt is a link to .*secret, outside"):
        write_external(str(folder), folder, False, tmp_path / "made")
    assert not (tmp_path / "made").exists()
