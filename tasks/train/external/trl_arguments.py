"""The settings of a recipe as arguments of TRL's GRPOConfig, and what TRL cannot do. This module
does not import torch."""

import importlib.util
from dataclasses import asdict
from typing import Any

from tasks.common.params import ParamsError, gathered
from tasks.engines.settings import Sampling
from tasks.train.loading import settings_of
from tasks.train.settings import Entropy, TrainSettings

CARRIED = {"trainer", "external", "batch", "learning_rate", "warmup_steps", "decay_share", "betas"}
CARRIED |= {"final_learning_rate_fraction", "weight_decay", "max_grad_norm", "dtype", "max_steps"}
CARRIED |= {"validation", "advantage", "loss"}
"""The keys of `train` that have an equivalent."""
AVERAGES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}  # loss_type of a clip

TAKEN = {"num_generations", "gradient_accumulation_steps", "loss_type", "beta", "bf16", "max_steps"}
TAKEN |= {"learning_rate", "max_completion_length", "temperature", "scale_rewards", "use_cpu"}
TAKEN |= {"num_iterations", "shuffle_dataset", "output_dir", "seed", "max_grad_norm"}
"""Arguments of GRPOConfig that other settings determine."""


def arguments_of(settings: TrainSettings, sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for a recipe. Raise ParamsError with every setting that
    has no equivalent in TRL, and for a TRL that is missing."""
    usual, other = asdict(TrainSettings()), asdict(settings)
    usual |= asdict(settings_of({}))
    with gathered() as problems:
        if settings.external.python is None and importlib.util.find_spec("trl") is None:
            problems.add(
                "train.trainer is trl, which is not installed: python -m pip install --no-deps "
                "-r requirements/trl.txt, or name another interpreter in train.external.python"
            )
        for key in other:
            if key not in CARRIED and other[key] != usual[key]:
                problems.add(
                    f"train.{key} is {other[key]}, which TRL cannot do: set it to {usual[key]}, or "
                    "train.trainer to own"
                )
        for key in {*settings.external.arguments} & TAKEN:
            problems.add(f"train.external.arguments.{key} follows from other settings: remove it")
        scale = problems.of(scale_of, settings.advantage)
        loss = problems.of(loss_of, settings.loss)
    return {
        "max_completion_length": sampling.max_tokens,
        "temperature": sampling.temperature,
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "num_iterations": 1,
        "bf16": settings.dtype == "bfloat16",
        "beta": 0.0,
        "gradient_checkpointing": False,
        "scale_rewards": scale,
        **loss,
        **settings.external.arguments,
    }


def scale_of(advantage: dict[str, Any]) -> str:
    """Return TRL's `scale_rewards` for an advantage. Raise ParamsError if there is none."""
    method = advantage["method"]
    if method == "dr_grpo":
        return "none"
    if method == "grpo_sample" and advantage["epsilon"] == 1.0e-4:
        return "group"
    if method == "grpo" and advantage["scale"] == "batch":
        return "batch"
    raise ParamsError(
        f"train.advantage is {advantage}, and TRL divides by the sample deviation of the group: "
        "set it to {method: grpo_sample}, {method: dr_grpo} or {method: grpo, scale: batch}"
    )


def loss_of(loss: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's arguments for a loss. Raise ParamsError if there are none."""
    method, normalize = loss["method"], str(loss.get("normalize"))
    is_plain = loss.get("entropy") == asdict(Entropy())
    if method == "cispo" and normalize == "token" and is_plain:
        return {"loss_type": "cispo", "epsilon_high": loss["cap"]}
    if method == "sapo" and normalize == "sequence" and is_plain:
        temperatures = {"pos": loss["tau_positive"], "neg": loss["tau_negative"]}
        return {
            "loss_type": "sapo",
            **{f"sapo_temperature_{sign}": value for sign, value in temperatures.items()},
        }
    is_known = normalize in AVERAGES and (loss.get("ratio") == "token" or normalize == "sequence")
    if method == "clip" and is_known and loss["dual"] is None and is_plain:
        return {
            "loss_type": AVERAGES[normalize],
            "epsilon": loss["clip_low"],
            "epsilon_high": loss["clip_high"],
            "delta": loss["max_ratio"],
            "importance_sampling_level": loss["ratio"],
        }
    raise ParamsError(
        f"train.loss is {loss}; TRL has clip (normalize token, sequence or constant; ratio "
        "sequence only with normalize sequence; no dual, no entropy), cispo with normalize token, "
        "and sapo with normalize sequence"
    )
