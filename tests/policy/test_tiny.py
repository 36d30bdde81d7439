"""The stage policy: the tiny policy."""

import dataclasses
import random
import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.code.__main__ import write
from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.common.code import ROOT
from tasks.common.files import write_json
from tasks.common.params import ParamsError, parse
from tasks.models.folder import policy_digest
from tasks.models.policy import read_policy, stop_token_ids
from tasks.policy import run
from tasks.policy.examples import draw
from tasks.policy.families import products
from tasks.policy.families.chain_sum import PHRASES, worked
from tasks.policy.run import provide
from tasks.policy.settings import Family, Policy, Tiny, Training
from tasks.policy.source import EMBEDDED, is_embedded
from tasks.policy.tiny import make, untrained
from tasks.policy.tokenizer import CHARACTERS, character_tokenizer
from tasks.policy.training import IGNORED, Row, batches, collate, encode, learning_rate, train
from tasks.policy.unfinished import Unfinished
from tests.train.worlds import Killed

CHAIN_SUM: dict[str, Any] = {
    "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "direct_rate_shortest": 0.0,
    "direct_rate_longest": 0.0,
    "step_error_rate": 0.0,
}
TINY: dict[str, Any] = {
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
        "tokens": 2000.0,
        "batch_size": 8,
        "batches_per_bucket": 4,
        "learning_rate": 1.0e-2,
        "warmup_rate": 0.1,
        "weight_decay": 0.0,
    },
}


def tiny(**changes: Any) -> Tiny:
    return parse({**TINY, **changes}, Tiny, "policy.tiny")


def family(**settings: Any) -> list[Family]:
    return [Family("chain_sum", 1.0, {**CHAIN_SUM, **settings})]


def test_worked_sum_by_hand():
    assert worked("4 + 3 - 9", 0.0, random.Random(0)) == "4+3=7-9=-2"
    # a wrong step is off by 1 or 10, and the next step builds on it
    first, second = worked("40 + 3 - 9", 1.0, random.Random(0)).split("=")[1:]
    total = int(first.partition("-")[0])
    assert abs(total - 43) in (1, 10)
    assert abs(int(second) - (total - 9)) in (1, 10)


def test_examples_follow_their_rates():
    for settings, steps in (
        ({}, True),
        ({"direct_rate_shortest": 1.0, "direct_rate_longest": 1.0}, False),
    ):
        for prompt, completion in next(draw(family(**settings), 0, 50)):
            expression = prompt.removeprefix(PHRASES[0]).removesuffix("=")
            assert int(completion.rpartition("=")[2]) == eval(expression)
            assert ("=" in completion) is steps


def test_worked_product_by_hand():
    text = products.worked("12 * 34 * -5", 0.0, random.Random(0))
    assert text == "10*30=300+10*4=340+2*30=400+2*4=408;400*-5=-2000+8*-5=-2040"
    assert products.worked("30 * 0 * 7", 0.0, random.Random(0)) == "30*0=0;0*7=0"
    wrong = products.worked("12 * 3", 1.0, random.Random(0))
    assert {abs(int(wrong.split("=")[1].split("+")[0]) - 30)} <= {1, 10}


def test_products_are_correct_and_start_with_their_phrases():
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


def test_chunks_depend_on_seed_and_number():
    stream, again, other = (draw(family(), seed, 20) for seed in (0, 0, 1))
    first, second = next(stream), next(stream)
    assert (first, second) == (next(again), next(again))
    assert first != second
    assert first != next(other)
    assert next(draw(family(), 0, 20, 1)) == second


def test_unknown_family_and_unknown_setting_are_named():
    with pytest.raises(ParamsError, match="'chain_sums'; use: chain_sum, products"):
        next(draw([Family("chain_sums", 1.0, CHAIN_SUM)], 0, 4))
    message = r"chain_sum.settings.noise is unknown; allowed: config, direct_rate"
    with pytest.raises(ParamsError, match=message):
        next(draw(family(noise=1), 0, 4))


def test_tokenizer_covers_ascii_and_has_a_token_per_phrase(tmp_path):
    character_tokenizer([*PHRASES], 128).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = f"{PHRASES[0]} 4 + 3 ="
    assert len(tokenizer.encode(prompt)) == 1 + len(" 4 + 3 =")
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    text = CHARACTERS + "  two  spaces ,."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.unk_token_id not in tokenizer.encode(text)
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (None, None)


def test_only_completions_are_learned():
    tokens, targets = collate([([5, 6, 7, 1], 2), ([5, 6, 1], 2)], pad=0)
    assert tokens.tolist() == [[5, 6, 7, 1], [5, 6, 1, 0]]
    assert targets.tolist() == [[IGNORED, 7, 1, IGNORED], [IGNORED, 1, IGNORED, IGNORED]]


def test_batches_contain_all_rows_sorted_by_length():
    rows = [([0] * length, 1) for length in (9, 1, 8, 2, 7, 3)]
    cut = batches(rows, 2, seed=0)
    assert sorted(sorted(len(ids) for ids, _ in batch) for batch in cut) == [[1, 2], [3, 7], [8, 9]]


def test_learning_rate_rises_and_falls_to_zero():
    settings = parse({**TINY["training"], "learning_rate": 1.0, "warmup_rate": 0.2}, Training, "t")
    rates = [learning_rate(settings, done) for done in (0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_training_lowers_the_loss(caplog):
    caplog.set_level("INFO")
    make(tiny(training={**TINY["training"], "tokens": 20000.0}))
    losses = [float(record.args[1]) for record in caplog.records if "of the tokens" in record.msg]
    assert losses[-1] < 0.6 * losses[0]


def trained(unfinished: Unfinished | None, chunks: int = 1000) -> torch.nn.Module:
    """Train a policy until `chunks` chunks have been drawn, and return it."""
    settings = tiny(training={**TINY["training"], "tokens": 8000.0})
    tokenizer = character_tokenizer([*PHRASES], 128)
    torch.manual_seed(0)
    model = untrained(settings.model, tokenizer).train()

    def draw_some(first: int) -> Iterator[list[Row]]:
        for number, chunk in enumerate(draw(family(), 0, 32, first), start=first):
            if number == chunks:
                raise Killed
            yield encode(tokenizer, chunk)

    train(model, draw_some, settings.training, 0, unfinished)
    return model


def test_killed_training_continues_to_the_same_weights(tmp_path, caplog):
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
    for content, seed, message in (
        (saved[:-1] + bytes([saved[-1] ^ 1]), 0, "is damaged"),
        (saved[:100], 0, "is damaged"),
        (saved, 1, "is of other settings"),
    ):
        caplog.clear()
        file.write_bytes(content)
        with pytest.raises(Killed):  # at the first chunk
            trained(Unfinished(file, {"seed": seed}, 0.0), chunks=0)
        assert message in caplog.text


class KilledAfter(Unfinished):
    """A checkpoint whose training is killed after it was saved `num` times."""

    num = 0

    def save_now_and_then(self, *arguments: Any) -> None:
        super().save_now_and_then(*arguments)
        self.num -= 1
        if not self.num:
            raise Killed


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_killed_training_continues_within_a_chunk(num, tmp_path):
    whole, unfinished = trained(None), KilledAfter(tmp_path / "policy.safetensors", {}, 0.0)
    unfinished.num = num
    with pytest.raises(Killed):
        trained(unfinished)
    again = trained(Unfinished(unfinished.path, {}, 0.0))
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_killed_making_is_continued_by_the_same_code_only(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    layout, settings = Layout(tmp_path), parse(section(), Policy, "policy")
    layout.code_folder.mkdir()
    monkeypatch.setattr(run, "write_own", Mock(side_effect=Killed))
    for code, num_continued in (("old", 0), ("old", 1), ("new", 1)):
        write_json(layout.code("policy"), {"files": {"a": code}})
        with pytest.raises(Killed):
            provide(settings, layout, every_seconds=0.0)
        assert caplog.text.count("going on after") == num_continued
    monkeypatch.undo()
    made = provide(settings, layout)
    assert not any(layout.checkpoints.iterdir())
    assert provide(settings, layout) == made


def test_tiny_policy_is_an_ordinary_model(tmp_path):
    layout = Layout(tmp_path)
    replaced = provide(parse(section(seed=1), Policy, "policy"), layout)
    torch.manual_seed(99)  # without effect
    card = provide(parse(section(), Policy, "policy"), layout)
    policy = read_policy(layout)
    assert (card["source"], card["location"]) == ("tiny", None)
    assert replaced["digest"] != card["digest"] == policy_digest(policy.folder) == policy.digest
    model = AutoModelForCausalLM.from_pretrained(policy.folder)
    tokenizer = AutoTokenizer.from_pretrained(policy.folder)
    # q, k, v, o of 32 x 32 per layer, three of 32 x 32 in the MLP; a tied head of vocabulary x 32
    assert card["num_matmul_parameters"] == 7 * 32 * 32 + len(tokenizer) * 32
    assert card["max_length"] == 128
    assert (model.config.head_dim, model.config.tie_word_embeddings) == (32, True)
    assert stop_token_ids(policy.folder, tokenizer) == (tokenizer.eos_token_id,)
    assert model.dtype == torch.float32


def test_embedded_policy_is_copied_where_code_and_settings_made_it(tmp_path):
    values, layout = params.load(ROOT / "params.yaml"), Layout(tmp_path)
    write(values, ROOT, layout.code_folder)
    settings, code = params.section(values, "policy", Policy), layout.code("policy")
    assert is_embedded(settings.tiny, code), (
        "code or settings that make the tiny policy have changed. Run `winnow run --until policy`, "
        "then copy data/policy, data/policy.json and data/code/policy.* to tasks/policy/embedded"
    )
    assert not is_embedded(dataclasses.replace(settings.tiny, seed=1), code)
    card = provide(settings, layout)
    assert card["digest"] == read_policy(layout).digest == "c509b7b8aa5d98bd"
    assert layout.policy_card.read_bytes() == EMBEDDED.policy_card.read_bytes()
    write_json(code, {"files": {}, "versions": {}})
    assert not is_embedded(settings.tiny, code)
    write_json(layout.policy_card, {})
    shutil.rmtree(layout.policy)
    code.unlink()  # of a stage that runs alone: its settings decide
    assert provide(settings, layout) == card


def section(**changes: Any) -> dict[str, Any]:
    return {"source": "tiny", "tiny": {**TINY, **changes}}
