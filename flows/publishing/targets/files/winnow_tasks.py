"""The exported prompts as a taskset of verifiers, in their order, with rewards from `winnow grade`
(see reward.py). Put this folder on PYTHONPATH; its id is winnow_tasks."""

import json
from pathlib import Path

import verifiers.v1 as vf
from reward import compute_score

__all__ = ["WinnowTasks"]


class WinnowData(vf.TaskData):
    ground_truth: str


class WinnowTask(vf.Task[WinnowData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace) -> float:
        return compute_score("winnow", trace.last_reply, self.data.ground_truth)


class WinnowTasks(vf.Taskset[WinnowTask, vf.TasksetConfig]):
    def load(self):
        with (Path(__file__).parent / "train.jsonl").open() as lines:
            for line in lines:
                yield WinnowTask(WinnowData(**json.loads(line)), self.config.task)
