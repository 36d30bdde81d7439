"""AReaL: a folder for `datasets.load_from_disk`, with `messages` and the answer."""

from typing import Any

from tasks.train.external.targets import Row, Target

SETTINGS = """\
actor.path={policy}
actor.optimizer.lr={learning_rate:g}
train_dataset.path={data}
train_dataset.type=rl
train_dataset.shuffle=false
train_dataset.batch_size={batch}
gconfig.n_samples={group_size}
gconfig.max_new_tokens={max_tokens}
gconfig.temperature={temperature:g}
total_train_epochs=1
"""


def row(visit: Row) -> dict[str, Any]:
    return {"messages": visit["messages"], "answer": visit["truth"], "index": visit["visit"]}


TARGET = Target("1.0.4", "dataset", row, SETTINGS, is_loadable=True)
