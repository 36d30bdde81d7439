"""Prompts in the terminal, in the policy's form."""

import pytest
from transformers import AutoModelForCausalLM

from flows.reading.prompts import read
from tasks.common.artifacts import PROMPTS
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tests.parameters import every_value
from tests.policies import make_policy, place_policy

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    root = tmp_path_factory.mktemp("prompts")
    layout = Layout(root / "data")
    folder = make_policy(root / "policy", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    place_policy(folder, layout, AutoModelForCausalLM.from_pretrained(folder))
    row = {**dict.fromkeys(PROMPTS.columns), "verifier": "numeric", "source": "mine"}
    rows = [
        {**row, "prompt_id": "p0", "prompt": "1 + 2 =\x1b", "answer": "3"},
        {**row, "prompt_id": "p1", "prompt": "What?", "answer": "many"},
    ]
    PROMPTS.write(layout.prompts("train"), PROMPTS.frame(rows))
    return layout


def test_a_prompt_is_shown_with_template_tokens_and_verdict(layout: Layout) -> None:
    text = "\n".join(read(every_value(), layout, "train", None, 5))
    assert "2 of 2 train prompts" in text
    assert "<s>user: 1 + 2 =\\x1b</s>" in text
    assert ", 1 <s>, 1 </s>\n" in text
    assert "gold: 3   numeric: correct\n" in text
    assert "gold: many   numeric: error (" in text


def test_a_missing_table_or_prompt_is_named(layout: Layout) -> None:
    for split, prompt, message in (
        ("test", None, "create it with `winnow run`"),
        ("train", "x", "no train prompt whose id begins with x"),
    ):
        with pytest.raises(ArtifactError, match=message):
            list(read(every_value(), layout, split, prompt, 1))
