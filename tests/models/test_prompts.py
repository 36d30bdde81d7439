"""Chat prompts: rendered by the policy's own template, which is part of the store's key; plain ones
stay plain."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from tasks.common.artifacts import PROMPTS, Layout
from tasks.common.files import ArtifactError
from tasks.models import chat
from tasks.models.policy import Policy, load_model, load_tokenizer, read_policy
from tasks.models.prompts import encode_chats, encode_prompts, template_of
from tasks.store.rollouts import StoredRollouts
from tests.policies import place_policy
from tests.store.test_rollouts import SETTINGS

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'developer' %}{{ raise_exception('no "
    "developers') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]


def prompts(*messages: list[dict[str, str]] | None) -> pl.DataFrame:
    """Prompts that differ in their id and their messages only."""
    row = {**PROMPTS.example, "prompt": "1 + 1 =", "answer": "2"}
    texts = [None if one is None else json.dumps(one) for one in messages]
    return PROMPTS.frame(
        [{**row, "prompt_id": f"p{n}", "messages": text} for n, text in enumerate(texts)]
    )


def world(root: Path, qwen: Path, template: str | None) -> tuple[Policy, Layout]:
    """A policy with a chat template, or without."""
    folder = Path(shutil.copytree(qwen, root / "policy"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    layout = Layout(root / "data")
    place_policy(
        folder, layout, load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    )
    return read_policy(layout), layout


def test_messages_are_rendered_and_plain_prompts_are_not(qwen: Path, tmp_path: Path) -> None:
    policy, _ = world(tmp_path, qwen, TEMPLATE)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    chat, plain = encode_prompts(prompts(MESSAGES, None), tokenizer, policy, 8)
    assert chat == tokenizer("[system]Be brief.[user]1 + 1 =[assistant]").input_ids
    assert plain == tokenizer("1 + 1 =").input_ids


def test_another_template_is_another_key_of_the_store(qwen: Path, tmp_path: Path) -> None:
    """The policy's digest says it too; the prompt's own digest must as well, for it is what a shard
    holds."""
    digests = []
    for name, template in (
        ("a", TEMPLATE),
        ("b", TEMPLATE.replace("[user]", "<user>").replace("[assistant]", ">")),
    ):
        policy, layout = world(tmp_path / name, qwen, template)
        for num_sampled in (4, 0):
            stored = StoredRollouts(
                prompts(MESSAGES, None),
                policy,
                2,
                SETTINGS,
                layout,
                cell="profile",
                greedy=False,
            )
            rows = pl.concat(stored.parts(lambda _: None)).sort("row")
            assert stored.usage.sampled_rollouts == num_sampled
        digests.append(rows["prompt_digest"].unique(maintain_order=True).to_list())
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1]


def test_a_policy_without_a_template_says_what_to_set(qwen: Path, tmp_path: Path) -> None:
    policy, _ = world(tmp_path, qwen, None)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    with pytest.raises(
        ArtifactError,
        match=r"prompt p1: it is chat messages, and the policy has no chat template: "
        r"set prompt_template",
    ):
        encode_prompts(prompts(None, MESSAGES), tokenizer, policy, 8)


def test_what_a_template_refuses_is_named(qwen: Path, tmp_path: Path) -> None:
    policy, _ = world(tmp_path, qwen, TEMPLATE)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    with pytest.raises(
        ArtifactError, match="prompt p0: the policy's chat template refuses it: no developers"
    ):
        encode_prompts(
            prompts([{"role": "developer", "content": "x"}, *MESSAGES]), tokenizer, policy, 8
        )


def test_a_template_that_prints_the_date_renders_the_same_every_day(
    qwen: Path, tmp_path: Path
) -> None:
    policy, _ = world(tmp_path, qwen, "{{ strftime_now('%d %b %Y') }}")
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    assert tokenizer.decode(encode_chats([(MESSAGES, True)], tokenizer)[0]) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "failure"),
    [
        ("{{ 'x' * 10**10 }}", "needs more than 2 GB of memory"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "ran for more than 0.5 s",
        ),
        ("{{ 'x' * 2 * 10**7 }}", r"makes 20,000,000 characters of it; the limit is 10,000,000"),
        ("{{ messages[7].content.strip() }}", "refuses it: list object has no element 7"),
        ("{{ messages + 1 }}", "fails on it: TypeError"),
        ("{% if %}", r"is not a valid template: .* \(line 1\)"),
    ],
)
def test_a_template_that_does_harm_is_ended_and_named(
    template: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    rendering = chat.Template(template, {"eos_token": "</s>"})
    (failed,) = rendering.render([(MESSAGES, True)])
    rendering.close()
    assert isinstance(failed, chat.TemplateFailed)
    assert re.search(f"the policy's chat template ({failure})", str(failed)), failed


def test_a_template_that_never_ends_is_not_tried_on_every_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    rendering, asked = chat.Template(endless, {}), list[int]()
    ask = rendering.pool.map

    def counted(requests: list[Any]) -> list[Any]:
        asked.append(len(requests))
        return ask(requests)

    monkeypatch.setattr(rendering.pool, "map", counted)
    first = next(rendering.render([(MESSAGES, True)] * 1000))
    rendering.close()
    assert isinstance(first, chat.TemplateFailed)
    assert asked == [1]


def test_a_conversation_that_fails_leaves_the_others_and_is_named(
    qwen: Path, tmp_path: Path
) -> None:
    template = "{% if messages[0].content == '2' %}{{ 'x' * 10**10 }}{% endif %}{{ eos_token }}"
    policy, _ = world(tmp_path, qwen, template)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    asked = [([{"role": "user", "content": str(n)}], True) for n in range(5)]
    first, *_, last = template_of(tokenizer).render(asked)
    assert first == last == tokenizer.eos_token
    with pytest.raises(ArtifactError, match=r"prompt p2: .*needs more than 2 GB of memory for it"):
        encode_prompts(prompts(None, *(one for one, _ in asked[1:])), tokenizer, policy, 8)


def test_prompts_that_do_not_fit_name_the_length_to_set(qwen: Path, tmp_path: Path) -> None:
    policy, _ = world(tmp_path, qwen, TEMPLATE)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=False)
    table = prompts(None, None, None).with_columns(prompt=pl.Series(["1" * 700, "1" * 510, "1"]))
    with pytest.raises(
        ArtifactError,
        match=r"prompt p1 has 510 tokens.*\(2 of 3 prompts do not fit\): "
        r"set .*max_prompt_characters below its 510",
    ):
        encode_prompts(table, tokenizer, policy, 8)
