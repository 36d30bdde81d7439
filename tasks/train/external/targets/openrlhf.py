"""OpenRLHF: JSON lines for PromptDataset, with the reward from `winnow grade`. It shuffles."""

from typing import Any

from tasks.train.external.targets import Row, Target

SETTINGS = """\
--data.prompt_dataset {data}
--data.input_key input
--data.label_key label
--data.apply_chat_template
--rollout.n_samples_per_prompt {group_size}
--rollout.temperature {temperature:g}
--rollout.max_new_tokens {max_tokens}
--rollout.batch_size {batch}
--data.max_len {total_tokens}
--actor.model_name_or_path {policy}
--reward.remote_url http://127.0.0.1:8008/openrlhf
"""


def row(visit: Row) -> dict[str, Any]:
    return {"input": visit["messages"], "label": visit["truth"], "datasource": "winnow"}


TARGET = Target("0.11.2", "jsonl", row, SETTINGS, keeps_order=False, files=(), is_loadable=True)
