"""verl: Parquet for RLHFDataset. Its agent loop takes each prompt's own group size from the column
`__rollout_n__` (verl/trainer/ppo/v1/agent_loop_tq.py)."""

from typing import Any

from tasks.train.external.targets import Row, Target

SETTINGS = """\
data.train_files={data}
data.val_files={folder}/validation.parquet
data.shuffle=False
data.train_batch_size={batch}
data.max_prompt_length={prompt_tokens}
data.max_response_length={max_tokens}
actor_rollout_ref.model.path={policy}
actor_rollout_ref.actor.optim.lr={learning_rate:g}
actor_rollout_ref.rollout.n={group_size}
actor_rollout_ref.rollout.temperature={temperature:g}
reward.custom_reward_function.path={folder}/reward.py
reward.custom_reward_function.name=compute_score
trainer.total_epochs=1
trainer.use_v1=True
"""


def row(visit: Row) -> dict[str, Any]:
    size = {"__rollout_n__": visit["group_size"]} if visit["group_size"] else {}
    return {
        "data_source": "winnow",
        "prompt": visit["messages"],
        "reward_model": {"style": "rule", "ground_truth": visit["truth"]},
        "extra_info": {"index": visit["visit"], "pass_rate": visit["pass_rate"]},
        **size,
    }


TARGET = Target(
    version="0.9.1",
    format="parquet",
    row=row,
    settings=SETTINGS,
    sizes="prompt",
    is_loadable=True,
    notes=(
        "only the trainer of trainer.use_v1 reads __rollout_n__; others sample "
        "actor_rollout_ref.rollout.n rollouts of every prompt",
        "a batch is padded to a multiple of ppo_mini_batch_size * rollout.n",
    ),
)
