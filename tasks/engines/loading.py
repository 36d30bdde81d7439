"""Which engine serves a stage, made for a policy, and whether it fits the GPU beside training."""

import importlib.util
from typing import cast

import torch
from transformers import PreTrainedModel

from tasks import engines
from tasks.common import registry
from tasks.engines.engine import Engine
from tasks.engines.memory import TrainingMemory, check_memory
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy


def engine_name(settings: EngineSettings) -> str:
    """Return the engine's name. `auto` is `server` where URLs or several replicas are set, `vllm`
    on a machine with a GPU where vLLM is installed, else `hf`; `server` where a cluster has
    engines."""
    if settings.name != "auto":
        return settings.name
    if settings.urls or settings.num_replicas > 1 or settings.has_cluster_engines:
        return "server"
    return "vllm" if torch.cuda.is_available() and importlib.util.find_spec("vllm") else "hf"


def load_engine(
    settings: EngineSettings, policy: Policy, model: PreTrainedModel | None = None
) -> Engine:
    """Return the engine `settings.name` for `policy`. With the trainer's `model`, the engine must
    replace its weights in place; one that can samples from `model` itself."""
    name = engine_name(settings)
    module = registry.load(engines, name, "engine.name")
    return cast(Engine, module.load(settings, policy, model))


def num_trainer_gpus(
    settings: EngineSettings, num_processes: int, device: torch.device, num_gpus: int | None = None
) -> int:
    """How many GPUs the `num_processes` of a trainer keep to themselves: all of theirs where this
    process sees one for every server that it starts as well; else none, and the engine's are the
    first ones, too."""
    if device.type != "cuda" or engine_name(settings) != "server" or settings.urls:
        return 0
    if settings.has_cluster_engines:  # on other GPUs, or other machines
        return num_processes
    seen = torch.cuda.device_count() if num_gpus is None else num_gpus
    return num_processes if seen >= num_processes + settings.num_replicas else 0


def check_shared_gpu(
    settings: EngineSettings, num_processes: int, device: torch.device, training: TrainingMemory
) -> None:
    """Raise ArtifactError when training, whose weights are loaded, and the engine do not fit the
    GPU together. On a CPU nothing is checked."""
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
