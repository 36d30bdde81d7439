"""Check that training and its engine fit the GPU or the main memory, without importing torch, and
that a run on a CPU uses it well."""

import importlib.util
import math
import os

from flows.doctor import rates
from flows.doctor.nvidia import Gpu
from flows.doctor.places import Model, Values
from tasks.common.files import ArtifactError
from tasks.engines.memory import (
    BFLOAT16,
    GIB,
    WEIGHT,
    TrainingMemory,
    check_memory,
    peak_bytes,
    training_memory,
)
from tasks.engines.settings import PARTS
from tasks.train import needs

LARGE = 2e7  # parameters of a policy whose speed on a CPU is that of its matrix products
MUCH_FASTER = 1.3  # ratio of speeds at which other settings are recommended


def num_cores() -> int:
    """Return how many cores this process may use; macOS reports only those of the machine."""
    is_known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1


def check(values: Values, model: Model | None, there: list[Gpu]) -> list[str]:
    engine = values["engine"]
    if engine["device"] == "cuda" and not there:
        return ["engine.device is cuda, but nvidia-smi finds no GPU here; set auto or cpu"]
    if engine["cluster"] != "local":
        return []
    if engine["device"] == "cpu" or not there:
        return [] if model is None else main_memory(values, model)
    found = []
    if engine["num_processes"] > len(there):
        found.append(
            f"engine.num_processes is {engine['num_processes']}, one per GPU, but there are "
            f"{len(there)} here"
        )
    return found if model is None else found + memory(values, model, there)


def memory(values: Values, model: Model, there: list[Gpu]) -> list[str]:
    """Return a message if training and engine do not fit the first GPU. The stage makes the same
    check after loading the weights."""
    engine, gpu = values["engine"], there[0]
    name = engine["name"]
    if name == "auto" and not engine["urls"] and engine["num_replicas"] == 1:
        name = "vllm" if importlib.util.find_spec("vllm") else "hf"
    num_parts = math.prod(engine["vllm"].get(part, 1) for part in PARTS)
    is_shared = len(there) < engine["num_processes"] + engine["num_replicas"] * num_parts
    reserves = name == "vllm" or (name in ("server", "auto") and not engine["urls"] and is_shared)
    training, loaded = of_learner(values, model)
    try:
        check_memory(
            training,
            engine["memory_fraction"] * gpu.total if reserves else 0.0,
            gpu.free - loaded,
            sleeps=name == "vllm" and engine["sleep"],
        )
    except ArtifactError as error:
        return [f"{gpu.name}: {error}"]
    return []


def of_learner(values: Values, model: Model) -> tuple[TrainingMemory, float]:
    """Return the memory of training, and the bytes of the weights that are loaded before it.
    Adapters are small, and are not counted."""
    train, learner = values["train"], values["learner"]
    lora = train["lora"]
    ranks = values["engine"]["num_processes"] // learner["replicas"]
    num_shards = None if learner["shard"] == "none" else ranks
    weight = WEIGHT[32 if lora is None else lora["base_bits"]]
    training = training_memory(
        model.num_parameters,
        model.num_parameters if train["dtype"] == "bfloat16" and weight == WEIGHT[32] else 0,
        model.vocab_size or 0,
        num_trained=None if lora is None else 0,
        num_reference=needs.reference_parameters(
            needs.read_train(train), model.num_parameters if lora is None else 0
        ),
        tokens_per_chunk=learner["tokens_per_logprob_chunk"],
        num_shards=num_shards,
        optimizer_bits=train["optimizer_bits"],
    )
    return training, 0.0 if num_shards else weight * model.num_parameters


def main_memory(values: Values, model: Model) -> list[str]:
    """Return a message if training does not fit the main memory, with the engine's copy of the
    weights where its dtype is not the trainer's."""
    training, loaded = of_learner(values, model)
    is_copy = values["engine"]["dtype"] != "float32"
    copy = BFLOAT16 * model.num_parameters if is_copy else 0.0
    needed = values["engine"]["num_processes"] * (loaded + peak_bytes(training, copy, sleeps=False))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= total:
        return []
    return [
        f"training needs {needed / GIB:.1f} GiB of main memory (weights {loaded / GIB:.1f}, "
        f"{training}, engine {copy / GIB:.1f}), and this machine has {total / GIB:.1f} GiB: use a "
        "smaller policy, train.lora, or a lower learner.tokens_per_logprob_chunk"
    ]


def idle_cpu(values: Values, model: Model | None, there: list[Gpu]) -> list[str]:
    """Return a remark if other settings of dtype and threads would multiply matrices much faster on
    this CPU. Small policies depend on other things."""
    engine, train = values["engine"], values["train"]
    on_gpu = engine["device"] != "cpu" and there
    if model is None or model.num_parameters < LARGE or on_gpu or engine["cluster"] != "local":
        return []
    now = min(rates.probe(engine["threads"], each["dtype"]) for each in (engine, train))
    best, threads, dtype = max(
        (rates.probe(threads, dtype), threads, dtype)
        for threads in {engine["threads"], num_cores()}
        for dtype in ("float32", "bfloat16")
    )
    if best < MUCH_FASTER * now:
        return []
    return [
        f"this CPU multiplies matrices {best / now:.1f} times as fast with engine.threads "
        f"{threads} and {dtype} as engine.dtype and train.dtype"
    ]
