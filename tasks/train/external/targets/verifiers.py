"""verifiers, and with it prime-rl: JSON lines that the taskset `winnow_tasks.py` reads in order."""

from typing import Any

from tasks.train.external.targets import Row, Target, turns_or_text

SETTINGS = """\
PYTHONPATH={folder}
env.taskset.id = "winnow_tasks"
env.taskset.data = "{data}"
model.name = "{policy}"
rollouts_per_example = {group_size}
sampling.max_tokens = {max_tokens}
sampling.temperature = {temperature:g}
optim.lr = {learning_rate:g}
"""


def row(visit: Row) -> dict[str, Any]:
    return {
        "id": visit["prompt_id"],
        "prompt": turns_or_text(visit),
        "ground_truth": visit["truth"],
    }


TARGET = Target(
    version="0.4.0",
    format="jsonl",
    row=row,
    settings=SETTINGS,
    is_chat=False,
    files=("reward.py", "winnow_tasks.py"),
    is_loadable=True,
)
