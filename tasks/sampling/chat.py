"""A prompt as the policy reads it: plain text as it stands, chat messages by the policy's own chat template.

What is rendered is digested in the rollout store's key, and so must not change from day to day: a template that prints
today's date always gets the same one.
"""

import datetime
import json
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError

DATE = datetime.date(2024, 7, 26)  # the one that Llama 3's templates fall back on


def render(text: str, messages: str | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of one prompt; `messages` as in the table PROMPTS. ArtifactError when there is no template for it, or
    when the template refuses it."""
    if messages is None:
        plain: Sequence[int] = tokenizer(text).input_ids
        return list(plain)
    if tokenizer.chat_template is None:
        raise ArtifactError(
            "it is chat messages, and the policy has no chat template: set prompt_template of its entry in "
            '`ingest.sources` (such as "{prompt}"), which makes it plain text, or take a policy with a template'
        )
    try:
        ids = tokenizer.apply_chat_template(
            json.loads(messages), add_generation_prompt=True, return_dict=False, strftime_now=DATE.strftime
        )
    except TemplateError as error:
        raise ArtifactError(f"the policy's chat template refuses it: {error}") from error
    return list(ids)
