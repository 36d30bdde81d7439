"""NeMo-RL: JSON lines with `input` and `output` for its response dataset."""

from typing import Any

from tasks.common.files import ArtifactError
from tasks.train.external.targets import Row, Target

SETTINGS = """\
policy.model_name={policy}
data.train.dataset_name=ResponseDataset
data.train.data_path={data}
data.train.input_key=input
data.train.output_key=output
data.shuffle=false
grpo.num_generations_per_prompt={group_size}
grpo.num_prompts_per_step={batch}
grpo.max_num_epochs=1
policy.generation.max_new_tokens={max_tokens}
policy.generation.temperature={temperature:g}
policy.optimizer.kwargs.lr={learning_rate:g}
"""


def row(visit: Row) -> dict[str, Any]:
    if visit["messages"] is None or len(visit["messages"]) > 1:
        raise ArtifactError(
            f"prompt {visit['prompt_id']} is not one message of a user, and NeMo-RL's response "
            "dataset has only such prompts: set no `system` in its entry of ingest.sources"
        )
    return {"input": visit["messages"][0]["content"], "output": visit["truth"]}


TARGET = Target("as documented in August 2026", "jsonl", row, SETTINGS)
