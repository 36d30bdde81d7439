"""A plain Parquet file with all columns, for any other program."""

from typing import Any

from tasks.train.external.targets import Row, Target

COLUMNS = (
    *("visit", "pass", "phase", "prompt_id", "group_size", "prompt", "messages", "answer"),
    *("verifier", "source", "level", "pass_rate", "pass_rate_low", "pass_rate_high"),
)

SETTINGS = """\
file: {data}
learning rate: {learning_rate:g}
maximum tokens: {max_tokens}
temperature: {temperature:g}
"""


def row(visit: Row) -> dict[str, Any]:
    columns = {name: visit[name] for name in COLUMNS if name in visit}
    return {**columns, "ground_truth": visit["truth"]}


TARGET = Target("any", "parquet", row, SETTINGS, sizes="prompt", is_chat=False, files=())
