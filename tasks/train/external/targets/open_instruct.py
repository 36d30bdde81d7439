"""open-instruct: Parquet with `messages`, `ground_truth` and `dataset`. It shuffles."""

from typing import Any

from tasks.train.external.targets import Row, Target

SETTINGS = """\
--dataset_mixer_list {folder} 1.0
--dataset_mixer_list_splits train
--model_name_or_path {policy}
--num_samples_per_prompt_rollout {group_size}
--num_unique_prompts_rollout {batch}
--response_length {max_tokens}
--temperature {temperature:g}
--learning_rate {learning_rate:g}
"""


def row(visit: Row) -> dict[str, Any]:
    return {"messages": visit["messages"], "ground_truth": visit["truth"], "dataset": "winnow"}


TARGET = Target("as documented in August 2026", "parquet", row, SETTINGS, keeps_order=False)
