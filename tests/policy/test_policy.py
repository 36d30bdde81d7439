"""The stage policy: the tiny policy, external ones, what is refused, and when a policy is kept or
made again."""

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError, read_json, write_json
from tasks.common.params import ParamsError, parse
from tasks.common.sealed import read_sealed, write_sealed
from tasks.common.stage import StageError
from tasks.models.folder import DATA_FILES, OBJECTS, check_folder, policy_digest
from tasks.models.policy import describe, load_model, read_policy, stop_token_ids
from tasks.policy.card import skeleton, whole_folder, write_external, write_own
from tasks.policy.examples import draw
from tasks.policy.families import products
from tasks.policy.families.chain_sum import PHRASES, worked
from tasks.policy.making import provide
from tasks.policy.settings import Family, Policy, Tiny, Training
from tasks.policy.source import from_store, resolve
from tasks.policy.tiny import make, untrained
from tasks.policy.tokenizer import CHARACTERS, character_tokenizer
from tasks.policy.training import IGNORED, batches, collate, learning_rate, train
from tasks.policy.unfinished import Unfinished
from tests.policies import make_policy

CHAIN_SUM: dict[str, Any] = {
    "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "direct_rate_shortest": 0.0,
    "direct_rate_longest": 0.0,
    "step_error_rate": 0.0,
}
TINY: dict[str, Any] = {
    "seed": 0,
    "families": [{"name": "chain_sum", "weight": 1.0, "settings": CHAIN_SUM}],
    "model": {
        "num_layers": 1,
        "hidden_size": 32,
        "num_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_length": 128,
    },
    "training": {
        "device": "cpu",
        "tokens": 2000.0,
        "batch_size": 8,
        "batches_per_bucket": 4,
        "learning_rate": 1.0e-2,
        "warmup_rate": 0.1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    },
}


def tiny(**changes: Any) -> Tiny:
    return parse({**TINY, **changes}, Tiny, "policy.tiny")


def family(**settings: Any) -> list[Family]:
    return [Family("chain_sum", 1.0, {**CHAIN_SUM, **settings})]


# ------------------------------------------------------------------------------------------------
# the tiny policy


def test_a_worked_example_shows_every_step():
    assert worked("4 + 3 - 9", 0.0, random.Random(0)) == "4+3=7-9=-2"


def test_a_wrong_step_is_off_by_1_or_10_and_the_next_builds_on_it():
    first, second = worked("40 + 3 - 9", 1.0, random.Random(0)).split("=")[1:]
    total = int(first.partition("-")[0])
    assert abs(total - 43) in (1, 10)
    assert abs(int(second) - (total - 9)) in (1, 10)


def test_examples_are_right_when_asked_and_direct_when_asked():
    for settings, steps in (
        ({}, True),
        ({"direct_rate_shortest": 1.0, "direct_rate_longest": 1.0}, False),
    ):
        for prompt, completion in next(draw(family(**settings), 0, 50)):
            expression = prompt.removeprefix(PHRASES[0]).removesuffix("=")
            assert int(completion.rpartition("=")[2]) == eval(expression)
            assert ("=" in completion) is steps


def test_a_worked_product_shows_every_step():
    text = products.worked("12 * 34 * -5", 0.0, random.Random(0))
    assert text == "10*30=300+10*4=340+2*30=400+2*4=408;400*-5=-2000+8*-5=-2040"
    assert products.worked("30 * 0 * 7", 0.0, random.Random(0)) == "30*0=0;0*7=0"
    wrong = products.worked("12 * 3", 1.0, random.Random(0))
    assert {abs(int(wrong.split("=")[1].split("+")[0]) - 30)} <= {1, 10}


def test_products_are_right_when_asked_and_share_their_phrases():
    config = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    settings = {"config": config, "direct_rate": 0.5, "step_error_rate": 0.0}
    pairs = next(draw([Family("products", 1.0, settings)], 0, 200))
    for prompt, completion in pairs:
        expression = prompt.removeprefix(products.PHRASES[0]).removesuffix(products.PHRASES[1])
        assert int(completion.rpartition("=")[2]) == eval(expression)
    assert 0.4 < sum("=" in completion for _, completion in pairs) / len(pairs) < 0.6


def test_longer_problems_are_answered_directly_more_often():
    pairs = next(draw(family(direct_rate_shortest=0.1, direct_rate_longest=0.9), 0, 2000))
    direct = {2: [], 3: []}
    for prompt, completion in pairs:
        direct[prompt.count(" + ") + prompt.count(" - ") + 1].append("=" not in completion)
    assert sum(direct[2]) / len(direct[2]) == pytest.approx(0.1, abs=0.04)
    assert sum(direct[3]) / len(direct[3]) == pytest.approx(0.9, abs=0.04)


def test_chunks_differ_and_repeat_under_the_seed():
    stream, again, other = (draw(family(), seed, 20) for seed in (0, 0, 1))
    first, second = next(stream), next(stream)
    assert (first, second) == (next(again), next(again))
    assert first != second
    assert first != next(other)


def test_an_unknown_family_and_an_unknown_setting_are_named():
    with pytest.raises(ParamsError, match="'chain_sums'; there is: chain_sum, products"):
        next(draw([Family("chain_sums", 1.0, CHAIN_SUM)], 0, 4))
    with pytest.raises(
        ParamsError, match=r"chain_sum.settings.noise is unknown; allowed: config, direct_rate"
    ):
        next(draw(family(noise=1), 0, 4))


def test_the_tokenizer_covers_ascii_and_makes_the_instruction_one_token(tmp_path):
    character_tokenizer([*PHRASES], 128).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = f"{PHRASES[0]} 4 + 3 ="
    assert len(tokenizer.encode(prompt)) == 1 + len(" 4 + 3 =")
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    everything = CHARACTERS + "  two  spaces ,."
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert tokenizer.unk_token_id not in tokenizer.encode(everything)
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (None, None)


def test_only_completions_are_learned():
    tokens, targets = collate([([5, 6, 7, 1], 2), ([5, 6, 1], 2)], pad=0)
    assert tokens.tolist() == [[5, 6, 7, 1], [5, 6, 1, 0]]
    assert targets.tolist() == [[IGNORED, 7, 1, IGNORED], [IGNORED, 1, IGNORED, IGNORED]]


def test_batches_hold_like_lengths_and_every_row():
    rows = [([0] * length, 1) for length in (9, 1, 8, 2, 7, 3)]
    cut = batches(rows, 2, seed=0)
    assert sorted(sorted(len(ids) for ids, _ in batch) for batch in cut) == [[1, 2], [3, 7], [8, 9]]


def test_the_learning_rate_rises_and_falls_to_zero():
    settings = parse({**TINY["training"], "learning_rate": 1.0, "warmup_rate": 0.2}, Training, "t")
    assert [learning_rate(settings, done) for done in (0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0.5, 1.0, 0.5, 0.0]
    )


def test_training_lowers_the_loss(caplog):
    caplog.set_level("INFO")
    make(tiny(training={**TINY["training"], "tokens": 20000.0}))
    losses = [float(record.args[1]) for record in caplog.records if "of the tokens" in record.msg]
    assert losses[-1] < 0.6 * losses[0]


def test_training_is_repeatable_under_its_seed():
    model, _ = make(tiny())
    torch.manual_seed(99)
    again, _ = make(tiny())
    other, _ = make(tiny(seed=1))
    weights, same, different = (list(m.state_dict().values()) for m in (model, again, other))
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, different, strict=True))


class Killed(Exception):
    """In place of a kill."""


def trained(unfinished: Unfinished | None, chunks: int = 1000) -> torch.nn.Module:
    """A policy, trained until so many chunks were asked for."""
    settings = tiny(training={**TINY["training"], "tokens": 8000.0})
    tokenizer = character_tokenizer([*PHRASES], 128)
    torch.manual_seed(0)
    model = untrained(settings.model, tokenizer).train()

    def draw_some(first: int) -> Iterator[list[tuple[str, str]]]:
        for number, chunk in enumerate(draw(family(), 0, 32, first), start=first):
            if number == chunks:
                raise Killed
            yield chunk

    train(model, tokenizer, draw_some, settings.training, 0, unfinished)
    return model


def test_a_killed_making_goes_on_to_the_same_weights(tmp_path, caplog):
    caplog.set_level("INFO")
    file, whole = tmp_path / "policy.safetensors", trained(None)
    with pytest.raises(Killed):
        trained(Unfinished(file, {"seed": 0}, 0.0), chunks=3)
    saved = file.read_bytes()
    again = trained(Unfinished(file, {"seed": 0}, 0.0))
    assert caplog.text.count("going on after") == 1
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    for content, seed, said in (
        (saved[:-1] + bytes([saved[-1] ^ 1]), 0, "is damaged"),
        (saved[:100], 0, "is damaged"),
        (saved, 1, "is of other settings"),
    ):
        caplog.clear()
        file.write_bytes(content)
        with pytest.raises(Killed):  # at the first chunk
            trained(Unfinished(file, {"seed": seed}, 0.0), chunks=0)
        assert said in caplog.text


def test_chunks_can_be_drawn_from_any_on():
    stream = draw(family(), 0, 20)
    first, second = next(stream), next(stream)
    assert next(draw(family(), 0, 20, 0)) == first
    assert next(draw(family(), 0, 20, 1)) == second


def test_the_tiny_policy_is_an_ordinary_model(tmp_path):
    card = write_own(*make(tiny()), tmp_path / "policy")
    write_sealed(tmp_path / "policy.json", card)
    policy = read_policy(Layout(tmp_path))
    assert (card["source"], card["location"], card["digest"]) == (
        "tiny",
        None,
        policy_digest(policy.folder),
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy.folder),
        AutoTokenizer.from_pretrained(policy.folder),
    )
    # a layer: q, k, v, o of 32 x 32, three of 32 x 32 in the MLP; the head of vocabulary x 32, tied
    assert card["num_matmul_parameters"] == 7 * 32 * 32 + len(tokenizer) * 32
    assert (card["max_length"], model.config.head_dim, model.config.tie_word_embeddings) == (
        128,
        32,
        True,
    )
    assert stop_token_ids(policy.folder, tokenizer) == (tokenizer.eos_token_id,)
    assert model.dtype == torch.float32


# ----------------------------------------------------------------------------------------------
# external policies


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("llama"), "llama")


def test_an_external_policy_keeps_its_weights_where_they_are(tmp_path, llama):
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
    write_sealed(tmp_path / "policy.json", card)
    assert read_policy(Layout(tmp_path)).folder == llama


def test_a_model_is_described_without_its_weights(tmp_path):
    """GPT-2, whose linear layers are of a class of their own: a layer has 4 h^2 in attention and 8
    h^2 in the MLP."""
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=100, eos_token_id=1, bos_token_id=1
    )
    config.save_pretrained(tmp_path)
    model = skeleton(tmp_path, False)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    card = describe(model)
    assert (card["num_matmul_parameters"], card["num_head_parameters"]) == (
        2 * 12 * 64 * 64 + 100 * 64,
        100 * 64,
    )
    assert (card["attention_width"], card["max_length"]) == (64, 1024)


def test_the_digest_is_of_content(tmp_path, llama):
    shutil.copytree(llama, tmp_path / "copy")
    assert policy_digest(tmp_path / "copy") == policy_digest(llama)
    (tmp_path / "copy" / "README.md").write_text("about")
    assert policy_digest(tmp_path / "copy") == policy_digest(llama)
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert policy_digest(tmp_path / "copy") != policy_digest(llama)


@pytest.mark.parametrize(
    ("weights", "message"),
    [("pytorch_model.bin", "pickled weights only .pytorch_model.bin."), (None, "no .*safetensors")],
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
        ((2**62).to_bytes(8, "little") + b"{}", "is no safetensors file"),
        (b"\x10", "is no safetensors file"),
        ((4).to_bytes(8, "little") + b"null", "is no safetensors file"),
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
    with pytest.raises(ArtifactError, match=f"its files hold no {name}: they would be random"):
        load(folder)
    with pytest.raises(ArtifactError, match=f"its files hold no {name}: they would be random"):
        write_external(str(folder), folder, False, tmp_path / "copied")


def test_a_configuration_of_another_model_is_refused_before_memory_is_taken(tmp_path, llama):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vocab_size": 10**9})
    with pytest.raises(ArtifactError, match=r"lm_head.weight is of shape .* asks for \(10{9},"):
        write_external(str(folder), folder, False, tmp_path / "copied")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_numbers_are_refused(tmp_path, llama, wrong):
    folder = Path(shutil.copytree(llama, tmp_path / "policy"))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][3, 4] = wrong
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"{name} holds what is not a finite number"):
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


def test_the_links_of_the_hugging_face_cache_are_its_own(tmp_path, llama):
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
def test_a_source_that_names_no_policy_is_explained(tmp_path, source, message):
    with pytest.raises(StageError, match=message):
        resolve(source, tmp_path, False)


def test_a_policy_in_a_store_is_fetched_once_without_what_could_run_code(tmp_path, llama):
    store = fsspec.filesystem("local")
    shutil.copytree(llama, tmp_path / "bucket" / "model")
    for name in ("training.py", "optimizer.pt"):
        (tmp_path / "bucket" / "model" / name).write_text("")
    patterns = DATA_FILES
    folder = from_store(store, f"{tmp_path}/bucket/model", tmp_path / "downloads", patterns)
    assert not {"training.py", "optimizer.pt"} & {path.name for path in folder.iterdir()}
    assert policy_digest(folder) == policy_digest(llama)
    written = (folder / "config.json").stat().st_mtime_ns
    assert from_store(store, f"{tmp_path}/bucket/model", tmp_path / "downloads", patterns) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [folder.name]


# ----------------------------------------------------------------------------------------------
# kept or made again


def test_an_interrupted_folder_leaves_the_old_one(tmp_path):
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
    with whole_folder(folder) as new:
        (new / "b").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def section(**changes: Any) -> dict[str, Any]:
    return {"source": "tiny", "trust_remote_code": False, "tiny": {**TINY, **changes}}


def provided(layout: Layout, **changes: Any) -> dict[str, Any]:
    return provide(parse(section(**changes), Policy, "policy"), layout)


def test_another_parameter_makes_another_policy(tmp_path):
    layout = Layout(tmp_path)
    card = provided(layout)
    other = provided(layout, seed=1)
    assert other["digest"] != card["digest"]
    assert (
        policy_digest(layout.policy) == other["digest"] == read_sealed(layout.policy_card)["digest"]
    )


@pytest.mark.slow
def test_the_command_makes_a_policy(tmp_path):
    params = {
        "policy": section(),
        "checkpoint": {"every_seconds": 0.0, "keep": 1},
        "tracking": {"uri": None, "experiment": "test", "max_weights_gb": 0.0, "also": []},
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    arguments = ["--params", str(tmp_path / "params.yaml"), "--data", str(tmp_path / "data")]
    subprocess.run([sys.executable, "-m", "tasks.policy", *arguments], check=True)
    policy = read_policy(Layout(tmp_path / "data"))
    assert policy.digest == policy_digest(policy.folder)
    assert list(Layout(tmp_path / "data").checkpoints.iterdir()) == []


def test_a_copied_policy_needs_its_folder_no_more(tmp_path):
    trained = make_policy(tmp_path / "trained", "qwen3")
    expected = policy_digest(trained)
    layout = Layout(tmp_path / "data")
    settings = parse({**section(), "source": str(trained)}, Policy, "policy")
    card = provide(settings, layout, copy=True)
    assert (card["source"], card["location"], card["digest"]) == (str(trained), None, expected)
    shutil.rmtree(trained)
    policy = read_policy(layout)
    assert (policy.folder, policy_digest(policy.folder)) == (layout.policy, expected)
    AutoModelForCausalLM.from_pretrained(policy.folder)
