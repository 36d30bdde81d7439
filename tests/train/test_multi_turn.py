"""Several turns with an environment: the policy's tokens, the end of a conversation, and its
cost."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from transformers import PreTrainedTokenizerBase

from tasks.common.accounting.ledger import Architecture, prefill_flops
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import OnEnded, Request, Samples
from tasks.engines.flops import sample_flops, turn_flops
from tasks.engines.settings import Sampling
from tasks.grading.verifiers import numeric
from tasks.models.prompts import render_reply
from tasks.train.environments.environment import load_environment
from tasks.train.methods.generate.multi_turn import Method, Settings
from tasks.train.sampling.grading import decode_samples
from tests.policies import character_tokenizer
from tests.train.recorded import from_record
from tests.train.steps import TOKENIZER, asked_of
from tests.train.worlds import make_trainer, make_world, run_steps, sampled

EOS = TOKENIZER.eos_token_id
ARCHITECTURE = Architecture(100, 10, 2, 8)
WORDS = {"name": "higher_lower", "higher": "+", "lower": "-", "no_number": "?"}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


class Script:
    """An engine that returns scripted turns and records its requests."""

    name, version, shares_weights = "script", "1", True

    def __init__(self, *turns: list[str], prefix_block: int = 1) -> None:
        self.turns, self.prefix_block, self.requests = list(turns), prefix_block, []

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Any:
        self.requests.append(request)
        texts = self.turns[len(self.requests) - 1]
        assert len(texts) == len(request.seeds)
        is_cut = [text.endswith("...") for text in texts]
        tokens = [
            ids(text.removesuffix("...")) + [EOS] * (not short)
            for text, short in zip(texts, is_cut, strict=True)
        ]
        reasons = ["length" if short else "stop" for short in is_cut]
        return Samples(tokens, [[-0.5] * len(t) for t in tokens], reasons)

    def set_weights(self, weights: object) -> None:
        """Weights make no difference."""

    def sleep(self) -> None:
        """There is no memory to release."""


def play(
    engine: Script, answers: list[str], counts: list[int], limit: int = 20, **changes: Any
) -> Samples:
    plain_prompts = asked_of(None, answers)
    settings = Settings(**{"environment": WORDS, "max_turns": 3, "max_turn_tokens": 3, **changes})
    seeds = list(range(sum(counts)))
    request = Request([ids("n=")] * len(answers), counts, seeds, Sampling(1.0, 1.0, 0, limit, 0))
    samples = Method(settings, 9).generate(engine, request, plain_prompts)
    assert samples.is_action is not None
    for tokens, logprobs, own in zip(
        samples.token_ids, samples.logprobs, samples.is_action, strict=True
    ):
        assert len(tokens) == len(logprobs) == len(own) <= limit
        assert all((logprob == 0.0) != mine for logprob, mine in zip(logprobs, own, strict=True))
    return samples


def test_a_conversation_continues_until_the_answer_is_correct() -> None:
    engine = Script(["5", "9", "7"], ["8", "x"], ["7", "6"])
    samples = play(engine, ["7", "7"], [2, 1])
    first, second, third = samples.token_ids
    assert first == [*ids("5"), EOS, *ids("+"), *ids("8"), EOS, *ids("-"), *ids("7"), EOS]
    assert second == [*ids("9"), EOS, *ids("-"), *ids("x"), EOS, *ids("?"), *ids("6"), EOS]
    assert third == [*ids("7"), EOS]
    assert samples.is_action is not None
    assert samples.is_action[0] == [True, True, False, True, True, False, True, True]
    assert samples.finish_reasons == ["stop"] * 3
    # the first turns share their group's prompt; each later turn has its own context
    assert [request.counts for request in engine.requests] == [[2, 1], [1, 1], [1, 1]]
    assert engine.requests[1].prompts == [ids("n=") + first[:3], ids("n=") + second[:3]]
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)
    assert {request.sampling.max_tokens for request in engine.requests} == {3}


def test_tokens_and_turns_of_a_conversation_are_limited() -> None:
    # two tokens, a reply of one, and three for the next turn are six
    assert len(play(Script(["5"], ["6"], ["8"]), ["7"], [1], limit=6).token_ids[0]) == 5
    assert len(play(Script(["5"]), ["7"], [1], limit=5).token_ids[0]) == 2
    assert len(play(Script(["5"], ["6"]), ["7"], [1], max_turns=2).token_ids[0]) == 5
    with pytest.raises(ParamsError, match="max_turn_tokens is 3, .* sampling.max_tokens 2"):
        play(Script(), ["7"], [1], limit=2)


def test_executed_flops_of_turns() -> None:
    """The masks suffice, so rollouts of a record cost the same."""
    masks = [[True, True, False, True, True], [True, True]]
    found = turn_flops(ARCHITECTURE, [2], [2], masks, 1)
    first = sample_flops(ARCHITECTURE, [2], [2], [2, 2], 1)
    second = sample_flops(ARCHITECTURE, [5], [1], [2], 1)
    assert found == pytest.approx([first[0] + second[0], first[1]])
    # a prefix cache has the complete blocks of earlier inputs: of the prompt's two tokens and the
    # turn's two, the last was no input, so the cache has one block of two
    cached = turn_flops(ARCHITECTURE, [2], [2], masks, 2)
    plain = sample_flops(ARCHITECTURE, [2], [2], [2, 2], 2)
    later = sample_flops(ARCHITECTURE, [5], [1], [2], 1) - prefill_flops(ARCHITECTURE, 2)
    assert cached == pytest.approx([plain[0] + later[0], plain[1]])


@pytest.mark.parametrize(
    ("answer", "turn", "reply"),
    [
        ("13", "12", "+"),
        ("13", "I say 14.", "-"),
        ("1/2", "0.5", None),
        ("7", r"\boxed{7} in 2 steps", None),
        ("1.5e3", "1500", None),
        ("7", "seven", "?"),
        ("7", "1/0", "?"),
        ("none", "5", None),
    ],
)
def test_replies_agree_with_the_verifier(answer: str, turn: str, reply: str | None) -> None:
    episode = load_environment(WORDS).start("a number", answer)
    assert episode.reply(turn) == reply
    if reply is None and answer != "none":
        assert numeric.verify(turn, answer).outcome == "correct"


def test_the_verifier_reads_one_turn_per_line() -> None:
    tokens = [*ids("12"), EOS, *ids("too small"), *ids("13"), EOS]
    own = [True] * 3 + [False] * len(ids("too small")) + [True] * 3
    samples = Samples([tokens], [[-1.0] * len(tokens)], ["stop"], [own])
    (text,) = decode_samples(samples, TOKENIZER)
    assert text == "12\ntoo small\n13"
    assert numeric.verify(text, "13").outcome == "correct"
    # a stop token is no text even if it is not special for the tokenizer
    other = dataclasses.replace(
        samples, token_ids=[[t if t != EOS else ids("!")[0] for t in tokens]]
    )
    assert decode_samples(other, TOKENIZER) == [text]


def test_an_unknown_environment_or_setting_is_named() -> None:
    with pytest.raises(ParamsError, match=r"environment\.name is 'chess'; use: higher_lower"):
        load_environment({"name": "chess"})
    with pytest.raises(ParamsError, match=r"environment\.name is None"):
        load_environment({})
    with pytest.raises(ParamsError, match=r"environment\.lower is missing"):
        load_environment({"name": "higher_lower", "higher": "+", "no_number": "?"})


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_reply_in_a_chat_follows_the_template() -> None:
    tokenizer = chat_tokenizer(CHATML)
    found = render_reply("too low", tokenizer, (EOS,), is_chat=True)
    (newline,) = tokenizer("\n").input_ids
    assert found[0] == newline
    assert tokenizer.decode(found[1:]) == "<user>too low<eos>\n<assistant>".replace(
        "\n", tokenizer.decode([newline])
    )
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": "too low"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    first = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert first + tokenizer("a").input_ids + [EOS] + found == whole
    assert (
        render_reply("too low", tokenizer, (EOS,), is_chat=False) == tokenizer("too low").input_ids
    )


def test_a_template_that_rewrites_finished_turns_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}"
        "<eos>{% endif %}{% endfor %}"
    )
    with pytest.raises(ArtifactError, match="changes a finished turn"):
        render_reply("more", chat_tokenizer(template), (EOS,), is_chat=True)


def test_a_reply_begins_after_the_stop_token_of_the_turn() -> None:
    """For example <end_of_turn>, which only generation_config.json lists. The template begins with
    the tokenizer's own stop token."""
    template = (
        "<eos>{% for m in messages %}<{{ m.role }}>{{ m.content }}| {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    (bar,) = tokenizer("|").input_ids
    found = render_reply("low", tokenizer, (EOS, bar), is_chat=True)
    assert tokenizer.decode(found) == " <user>low| <assistant>"
    with pytest.raises(ArtifactError, match="ends an assistant's turn without a token"):
        render_reply("low", tokenizer, (EOS,), is_chat=True)


GENERATE = {
    "method": "multi_turn",
    "environment": {**WORDS, "higher": "+1", "lower": "1"},
    "max_turns": 3,
    "max_turn_tokens": 2,
}


def test_training_over_several_turns_uses_only_the_policys_tokens(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, [4] * 12)
    trainer = make_trainer(layout, generate=GENERATE)
    run_steps(trainer, 3)
    trainer.validate()
    trainer.collector.grader.close()
    state = trainer.state
    assert sum(row["num_updates"] for row in state.steps) > 0
    rows = pl.concat(state.rollouts)
    own = rows["is_action"].list.sum().sum()
    total = rows["token_ids"].list.len().sum()
    assert 0 < own < total
    replies = rows.filter(~pl.col("is_action").list.all())
    assert len(replies) > 0
    # the record reproduces the run with its masks
    again = make_trainer(layout, generate=GENERATE)
    from_record(rows)(again)
    recomputed = sampled(again)
    mine = rows.filter(pl.col("step") == 0)["is_action"].explode().to_numpy()
    np.testing.assert_array_equal(recomputed.fresh.trained_N(), mine)
    estimated = again.estimate(recomputed.fresh, again.rng())
    assert (estimated.advantages_N[~mine] == 0).all()
    assert estimated.advantages_N[mine].any()
    assert again.learner.totals(estimated).num_tokens == mine.sum()
    again.collector.grader.close()
