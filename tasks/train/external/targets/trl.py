"""TRL: Parquet for GRPOTrainer; its other columns reach the reward function."""

from typing import Any

from tasks.train.external.targets import Row, Target, turns_or_text

SETTINGS = """\
train_dataset=load_dataset("parquet", data_files="{data}", split="train")
model="{policy}"
reward_funcs=[reward.winnow]
num_generations={group_size}
shuffle_dataset=False
num_train_epochs=1
per_device_train_batch_size={rollouts}
max_completion_length={max_tokens}
temperature={temperature:g}
learning_rate={learning_rate:g}
"""


def row(visit: Row) -> dict[str, Any]:
    return {
        "prompt": turns_or_text(visit),
        "ground_truth": visit["truth"],
        "pass_rate": visit["pass_rate"],
    }


TARGET = Target("1.16.0", "parquet", row, SETTINGS, is_chat=False, is_loadable=True)
