"""Choice and creation of a stage's engine, and the check that engine and training fit the GPU."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel

from tasks import engines
from tasks.common import registry
from tasks.engines.engine import Engine
from tasks.engines.memory import TrainingMemory, check_memory
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy

LEAST_LENGTH = 64  # tokens of prompt and completion: enough for the probe of a server


def engine_name(settings: EngineSettings) -> str:
    """Return the engine's name. For `auto`, it is `server` if `urls`, several replicas or cluster
    engines are set, else `vllm` if this machine has a GPU and vLLM is installed, else `hf`."""
    if settings.name != "auto" or settings.has_servers:
        return "server" if settings.has_servers else settings.name
    return "vllm" if torch.cuda.is_available() and importlib.util.find_spec("vllm") else "hf"


def load_engine(
    settings: EngineSettings,
    policy: Policy,
    model: PreTrainedModel | None = None,
    *,
    longest: int | None = None,
    logs: Path | None = None,
) -> Engine:
    """Return the engine `settings.name` for `policy`. If the trainer's `model` is given, the engine
    must support new weights in place; `hf` then samples from `model` itself if it can.

    `longest` is the length in tokens of the longest prompt with its completion (None: unknown). No
    memory is reserved for longer sequences. The logs of servers are kept under `logs`."""
    if longest is not None:
        length = min(max(longest, LEAST_LENGTH), policy.max_length)
        policy = replace(policy, max_length=length)
    name = engine_name(settings)
    module = registry.load(engines, name, "engine.name")
    more = [logs] if name == "server" else []
    return cast(Engine, module.load(settings, policy, model, *more))


def num_trainer_gpus(
    settings: EngineSettings, num_processes: int, device: torch.device, num_gpus: int | None = None
) -> int:
    """Return the number of GPUs that only the trainer uses. This is `num_processes` if the servers
    are on a cluster, or if `num_gpus` (default: all visible GPUs) suffice for trainer and servers.
    It is 0 on a CPU, with `urls`, or if trainer and engine share the first GPUs."""
    if device.type != "cuda" or engine_name(settings) != "server" or settings.urls:
        return 0
    if settings.has_cluster_engines:  # on other GPUs, or other machines
        return num_processes
    seen = torch.cuda.device_count() if num_gpus is None else num_gpus
    return num_processes if seen >= num_processes + settings.num_server_gpus else 0


def check_shared_gpu(
    settings: EngineSettings, num_processes: int, device: torch.device, training: TrainingMemory
) -> None:
    """Raise ArtifactError if `training` and the engine together do not fit the GPU's free memory.
    On a CPU, check nothing."""
    if device.type != "cuda":
        return
    name = engine_name(settings)
    free, total = torch.cuda.mem_get_info(device)
    is_shared = not num_trainer_gpus(settings, num_processes, device)
    reserves = name == "vllm" or (name == "server" and not settings.urls and is_shared)
    check_memory(
        training,
        settings.memory_fraction * total if reserves else 0.0,
        free,
        sleeps=name == "vllm" and settings.sleep,
    )
