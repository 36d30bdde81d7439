"""Use an export as its trainer does. Run by an interpreter that has the trainer, which has no
Winnow: `python inside.py PART FILE`, with settings.txt beside FILE. Prints the result as JSON."""

import asyncio
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

PADDED = "so it is 7<eos>"  # a correct completion, as AReaL and OpenRLHF decode it


def verl_groups(path, lines):
    """Return the number of rollouts that verl's agent loop starts for each prompt, in order, and
    the reward of its custom reward function. Only sampling is replaced."""
    import transfer_queue as tq
    from hydra import compose, initialize_config_module
    from transformers import AutoTokenizer
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    rows = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    started = [0] * len(rows)

    class Counting(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        def __init__(self):
            self.config, self.background_tasks = config, set()

        async def _run_agent_loop(self, *_, uid, **__):
            started[int(uid)] += 1

    async def put(**_):
        pass

    async def generate():
        worker = Counting()
        batch = collate_fn([{**rows[n], "uid": str(n)} for n in range(len(rows))])
        batch = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(batch, "global_steps", 0)
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)

    tq.async_kv_put = put
    asyncio.run(generate())
    reward, row = get_custom_reward_fn(config), rows[0]
    truth = row["reward_model"]["ground_truth"]
    score = reward(row["data_source"], "so it is 7", truth, extra_info=row["extra_info"])
    return {"groups": started, "reward": score}


def verifiers_rewards(path, lines):
    """Return the reward of a gold trace for each task."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    sys.path.insert(0, str(Path(path).parents[2]))
    config = taskset_config_type("winnow_tasks")(id="winnow_tasks", data=path)

    async def score(task):
        reply = MessageNode(message=vf.AssistantMessage(content="so it is 7"), sampled=True)
        row = TraceTask(type=type(task).__name__, data=task.data)
        trace = Trace(task=row, agent=AgentInfo(config=vf.AgentConfig()), nodes=[reply])
        await task.score(trace)
        return trace.reward

    return [asyncio.run(score(task)) for task in load_taskset(config)]


def openrlhf_reward(path, lines):
    """Return the answer to the request of OpenRLHF's executor."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    row = json.loads(Path(path).read_text().splitlines()[0])
    address = f"{os.environ['WINNOW_GRADER']}/openrlhf?token={os.environ['WINNOW_TOKEN']}"
    executor, prompt = SingleTurnAgentExecutor(address), row["input"][0]["content"]
    call = executor._fetch_rewards_via_http([prompt + PADDED], [prompt], [row["label"]])
    return asyncio.run(call)


def skyrl_reward(path, lines):
    """Return the reward of a step of the environment that is made as SkyRL makes it."""
    import skyrl_gym
    from datasets import load_dataset

    sys.path.insert(0, str(Path(path).parents[2]))
    skyrl_gym.register(id="winnow", entry_point="winnow_env:WinnowEnv")
    row = load_dataset("parquet", data_files=path)["train"][0]
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    env = skyrl_gym.make(row["env_class"], env_config={}, extras=extras)
    env.init(row["prompt"])
    return env.step("so it is 7")["reward"]


def areal_reward(path, lines):
    """Return the reward that AReaL's wrapper computes in its own process."""
    from areal.api.reward_api import AsyncRewardWrapper
    from datasets import load_from_disk

    sys.path.insert(0, str(Path(path).parents[2]))
    import reward

    row = load_from_disk(path)[0]
    return asyncio.run(AsyncRewardWrapper(reward.areal)("", PADDED, [], [], **row))


def saved_dataset(path, lines):
    """Return the first prompt of a saved dataset, and its ground truths."""
    from datasets import load_from_disk

    rows = load_from_disk(path)
    return [rows[0]["messages"], [json.loads(row["answer"])["prompt_id"] for row in rows]]


def trl_steps(path, lines):
    """Train three steps with the lines of settings.txt, and return the groups of each step and
    their rewards."""
    sys.modules["vllm"] = None
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(Path(path).parents[2]))
    import reward

    own = eval(f"dict({', '.join(lines)})", {"load_dataset": load_dataset, "reward": reward})
    (function,), steps = own.pop("reward_funcs"), []

    def winnow(completions, ground_truth, **more):
        rewards = function(completions=completions, ground_truth=ground_truth, **more)
        steps.append([[json.loads(one)["prompt_id"] for one in ground_truth], rewards])
        return rewards

    to_trainer = {key: own.pop(key) for key in ("model", "train_dataset")}
    with_them = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    config = GRPOConfig(output_dir=os.environ["HF_HOME"], max_steps=3, **with_them, **own)
    trainer = GRPOTrainer(reward_funcs=winnow, args=config, **to_trainer)
    trainer.train()
    return {"steps": steps, "trained": trainer.state.global_step}


if __name__ == "__main__":
    part, path = sys.argv[1:]
    lines = (Path(path).parent / "settings.txt").read_text().splitlines()
    with redirect_stdout(sys.stderr):
        found = globals()[part](path, lines)
    print(json.dumps(found))
