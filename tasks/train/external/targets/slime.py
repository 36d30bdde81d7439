"""slime: JSON lines with `prompt`, `label` and `metadata`, with the reward from `winnow grade`."""

from typing import Any

from tasks.train.external.targets import Row, Target, turns_or_text

SETTINGS = """\
--hf-checkpoint {policy}
--prompt-data {data}
--input-key prompt
--label-key label
--metadata-key metadata
--apply-chat-template   # for chats; without it the text is sampled unchanged
--n-samples-per-prompt {group_size}
--rollout-batch-size {batch}
--num-epoch 1
--rollout-max-response-len {max_tokens}
--rollout-temperature {temperature:g}
--lr {learning_rate:g}
--rm-type remote_rm
--rm-url http://127.0.0.1:8008/slime
"""


def row(visit: Row) -> dict[str, Any]:
    metadata = {"index": visit["visit"], "pass_rate": visit["pass_rate"]}
    return {"prompt": turns_or_text(visit), "label": visit["truth"], "metadata": metadata}


TARGET = Target("as documented in August 2026", "jsonl", row, SETTINGS, is_chat=False, files=())
