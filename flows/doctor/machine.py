"""Check that training and its engine fit the GPU, without importing torch."""

import importlib.util
import math

from flows.doctor.nvidia import Gpu
from flows.doctor.places import Model, Values
from tasks.common.files import ArtifactError
from tasks.engines.memory import WEIGHT, check_memory, training_memory
from tasks.engines.settings import PARTS
from tasks.train import needs


def check(values: Values, model: Model | None, there: list[Gpu]) -> list[str]:
    engine = values["engine"]
    if engine["device"] == "cuda" and not there:
        return ["engine.device is cuda, but nvidia-smi finds no GPU here; set auto or cpu"]
    if engine["device"] == "cpu" or engine["cluster"] != "local" or not there:
        return []
    found = []
    if engine["num_processes"] > len(there):
        found.append(
            f"engine.num_processes is {engine['num_processes']}, one per GPU, but there are "
            f"{len(there)} here"
        )
    return found if model is None else found + memory(values, model, there)


def memory(values: Values, model: Model, there: list[Gpu]) -> list[str]:
    """Return a message if training and engine do not fit the first GPU. The stage makes the same
    check after loading the weights. Adapters are small, and are not counted."""
    engine, train, gpu = values["engine"], values["train"], there[0]
    lora, name = train["lora"], engine["name"]
    if name == "auto" and not engine["urls"] and engine["num_replicas"] == 1:
        name = "vllm" if importlib.util.find_spec("vllm") else "hf"
    num_parts = math.prod(engine["vllm"].get(part, 1) for part in PARTS)
    is_shared = len(there) < engine["num_processes"] + engine["num_replicas"] * num_parts
    reserves = name == "vllm" or (name in ("server", "auto") and not engine["urls"] and is_shared)
    learner = values["learner"]
    ranks = engine["num_processes"] // learner["replicas"]
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
    try:
        check_memory(
            training,
            engine["memory_fraction"] * gpu.total if reserves else 0.0,
            gpu.free - (0 if num_shards else weight * model.num_parameters),
            sleeps=name == "vllm" and engine["sleep"],
        )
    except ArtifactError as error:
        return [f"{gpu.name}: {error}"]
    return []
