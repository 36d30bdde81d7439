"""The stage policy: external policies and their sources."""

import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    JetMoeConfig,
)

from tasks.common.artifacts import Layout
from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError, write_text
from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.models.folder import DATA_FILES, check_folder, policy_digest
from tasks.models.policy import describe, read_policy
from tasks.policy.card import skeleton, whole_folder, write_external
from tasks.policy.settings import Policy
from tasks.policy.source import from_store, resolve

SHAPE = {"hidden_size": 8, "vocab_size": 10, "num_hidden_layers": 2, "num_key_value_heads": 1}


def test_weights_of_an_external_policy_are_not_copied(tmp_path, llama):
    card = write_external(
        str(llama), resolve(str(llama), tmp_path, False), False, tmp_path / "policy"
    )
    model = AutoModelForCausalLM.from_pretrained(llama)
    assert (card["location"], card["architecture"]) == (str(llama), "LlamaForCausalLM")
    assert card["num_parameters"] == sum(weight.numel() for weight in model.parameters())
    assert card["num_head_parameters"] == len(AutoTokenizer.from_pretrained(llama)) * 64
    copied = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= copied
    assert "model.safetensors" not in copied
    write_checked(tmp_path / "policy.json", card)
    assert read_policy(Layout(tmp_path)).folder == llama


def test_model_is_described_without_its_weights(tmp_path):
    """The linear layers of GPT-2 have a separate class: 4 h^2 parameters in attention and 8 h^2 in
    the MLP."""
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=100, eos_token_id=1, bos_token_id=1
    )
    config.save_pretrained(tmp_path)
    model = skeleton(tmp_path, False)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    card = describe(model)
    assert card["num_matmul_parameters"] == 2 * 12 * 64 * 64 + 100 * 64
    assert card["num_head_parameters"] == 100 * 64
    assert (card["attention_width"], card["max_length"]) == (64, 1024)


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        # attention of 4 x 8 x 8, a shared expert of 3 x 8 x 6, two of four experts of that size
        (
            AriaTextConfig(
                **SHAPE, num_attention_heads=1, intermediate_size=6, moe_num_experts=4,
                moe_topk=2, moe_num_shared_experts=1,
            ),
            256 + 144 + 2 * 144,
        ),
        # keys and values of 8 x 8, two routers of 8 x 4, two of four experts in attention (queries
        # and outputs of 8 x 4) and in the MLP (3 x 8 x 12)
        (
            JetMoeConfig(
                **SHAPE, kv_channels=4, intermediate_size=12, num_local_experts=4,
                num_experts_per_tok=2,
            ),
            64 + 2 * 32 + 2 * 64 + 2 * 288,
        ),
    ],
)  # fmt: skip
def test_a_token_passes_only_its_experts(config, layer):
    with torch.device("meta"):
        card = describe(AutoModelForCausalLM.from_config(config))
    assert card["num_matmul_parameters"] == 2 * layer + 10 * 8


def test_digest_depends_on_content_only(tmp_path, llama):
    shutil.copytree(llama, tmp_path / "copy")
    assert policy_digest(tmp_path / "copy") == policy_digest(llama)
    (tmp_path / "copy" / "README.md").write_text("about")
    assert policy_digest(tmp_path / "copy") == policy_digest(llama)
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert policy_digest(tmp_path / "copy") != policy_digest(llama)


def test_links_within_the_hugging_face_cache_are_allowed(tmp_path, llama):
    model = tmp_path / "models--org--name"
    snapshot, blobs = model / "snapshots" / "ab12", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(llama.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    card = write_external("hf://org/name@ab12", snapshot, False, tmp_path / "made")
    assert card["digest"] == policy_digest(llama)
    (snapshot / "notes.txt").symlink_to("../../../other/blobs/0")
    with pytest.raises(ArtifactError, match="outside"):
        check_folder(snapshot)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://org/name", "name a revision"),
        ("hf://name@main", "hf://org/name@revision"),
        ("ftp://host/x", "choose from: tiny, a folder, hf://"),
        ("Qwen/Qwen3-0.6B", "not a folder; or did you mean hf://Qwen/Qwen3-0.6B@REVISION"),
    ],
)
def test_invalid_source_is_an_error(tmp_path, source, message):
    with pytest.raises((ParamsError, StageError), match=message):
        resolve(Policy(source).source, tmp_path, False)


def test_policy_in_a_store_is_fetched_once_without_code(tmp_path, llama):
    store, model = fsspec.filesystem("local"), tmp_path / "bucket" / "model"
    shutil.copytree(llama, model)
    write_text(model / "additional_chat_templates" / "chat_template.jinja", "{{ messages }}")
    (model / "own.tiktoken").touch()
    expected = policy_digest(model)
    for name in ("training.py", "optimizer.pt", "additional_chat_templates/notes.json"):
        (model / name).write_text("")
    arguments = store, str(model), tmp_path / "downloads", DATA_FILES
    folder = from_store(*arguments)
    names = {path.name for path in folder.rglob("*")}
    assert not {"training.py", "optimizer.pt", "notes.json"} & names
    assert policy_digest(folder) == expected
    assert "own.tiktoken" in names
    written = (folder / "config.json").stat().st_mtime_ns
    assert from_store(*arguments) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [folder.name]


def test_interrupted_write_keeps_the_old_folder(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "a").write_text("old")

    def interrupted() -> None:
        with whole_folder(folder) as new:
            (new / "a").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (folder / "a").read_text() == "old"
