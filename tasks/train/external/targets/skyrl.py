"""SkyRL: Parquet for PromptDataset, with an environment that gets its reward from `winnow grade`
(the file `winnow_env.py` beside the data). It shuffles."""

from typing import Any

from tasks.train.external.targets import Row, Target

SETTINGS = """\
data.train_data=['{data}']
data.val_data=['{folder}/validation.parquet']
trainer.policy.model.path={policy}
trainer.policy.optimizer_config.lr={learning_rate:g}
trainer.train_batch_size={batch}
trainer.epochs=1
trainer.max_prompt_length={prompt_tokens}
generator.n_samples_per_prompt={group_size}
generator.sampling_params.max_generate_length={max_tokens}
generator.sampling_params.temperature={temperature:g}
skyrl_gym.register(id="winnow", entry_point="winnow_env:WinnowEnv")  # in your script
"""


def row(visit: Row) -> dict[str, Any]:
    return {
        "prompt": visit["messages"],
        "env_class": "winnow",
        "reward_spec": {"method": "rule", "ground_truth": visit["truth"]},
        "extra_info": {"index": visit["visit"], "pass_rate": visit["pass_rate"]},
    }


TARGET = Target(
    version="0.3.0",
    format="parquet",
    row=row,
    settings=SETTINGS,
    keeps_order=False,
    files=("reward.py", "winnow_env.py"),
    is_loadable=True,
)
