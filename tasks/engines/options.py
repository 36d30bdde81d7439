"""The options of vLLM's engines: those that the engine contract requires, and the user's own
(`engine.vllm`), which vLLM validates before anything is loaded.

vLLM is imported only to check a user's own options, since its import takes seconds."""

import json
import logging
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tasks.common.params import ParamsError, meant
from tasks.engines.settings import EngineSettings

if TYPE_CHECKING:
    from tasks.models.policy import Policy

Options = Mapping[str, Any]

CHOICES = re.compile("must be one of|should be", re.IGNORECASE)  # in messages that list choices
MAX_REASON = 300  # characters of vLLM's own message


def own_options(settings: EngineSettings, policy: "Policy", *, on_gpu: bool) -> dict[str, Any]:
    """Return the options that the engine contract requires, keyed by the names of vLLM's engine
    arguments."""
    return {
        "model": str(policy.folder.resolve()),
        "dtype": settings.dtype,
        "load_format": "safetensors",
        "max_model_len": policy.max_length,
        "max_num_seqs": settings.max_rows,
        "gpu_memory_utilization": settings.memory_fraction,
        "enable_prefix_caching": True,
        # a seeded request cannot be rewound on a CPU (its generator has no offset)
        "enable_chunked_prefill": on_gpu,
        "enforce_eager": not on_gpu,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "trust_remote_code": policy.trust_remote_code,
    }


def as_arguments(options: Options) -> list[str]:
    """Return options as command line arguments of vLLM's server."""
    found: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            found += [f"--{flag}", text]
    return found


def checked(own: Options, given: Options) -> dict[str, Any]:
    """Return Winnow's `own` options with the user's (`given`) added. Raise ParamsError if vLLM
    would not start with them; without vLLM on this machine, only remote servers check them."""
    if given and find_spec("vllm"):
        before = dict(os.environ)
        logging.disable(logging.WARNING)
        try:
            problem = objection(own, given)
        finally:
            logging.disable(logging.NOTSET)
            for name in os.environ.keys() - before.keys():  # variables that vLLM sets
                del os.environ[name]
            os.environ.update(before)
        if problem:
            raise ParamsError(problem)
    return {**own, **deepcopy(dict(given))}


def objection(own: Options, given: Options) -> str | None:
    """Return why vLLM does not accept the options `given` with Winnow's `own`, in one sentence.
    Return None if vLLM accepts them, or cannot check them because it rejects `own` alone."""
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils import argparse_utils

    arguments: Any = argparse_utils.FlexibleArgumentParser
    known = [action.dest for action in AsyncEngineArgs.add_cli_args(arguments())._actions]
    for name in given:
        if name not in known:
            guess = meant(name, known)
            advice = f"; did you mean {guess}?" if guess else ""
            return f"engine.vllm.{name} is not an option of vLLM {__version__}{advice}"
    together = refusal({**own, **given})
    if together is None or refusal(own) is not None:
        return None
    for name, value in given.items():
        if (why := refusal({**own, name: value})) is not None:
            words = re.findall(r"'([^']+)'", why) if CHOICES.search(why) else []
            guess = meant(value, words)
            advice = f"did you mean {guess}?" if guess else why[:MAX_REASON]
            return f"engine.vllm.{name} is {value!r}, which vLLM {__version__} refuses: {advice}"
    names = ", ".join(given)
    return f"engine.vllm: vLLM {__version__} refuses {names} together: {together[:MAX_REASON]}"


def refusal(options: Options) -> str | None:
    """Return in one line why vLLM does not start with these options, or None. Load no model."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**deepcopy(dict(options))).create_engine_config()  # this changes mappings
    except Exception as error:  # of any kind: its message is for the user
        reason = str(error) or type(error).__name__
        if errors := getattr(error, "errors", None):  # of a validation by pydantic
            where, message = ".".join(map(str, errors()[0]["loc"])), errors()[0]["msg"]
            reason = f"{where}: {message}" if where else message.removeprefix("Value error, ")
        return " ".join(reason.split())
    return None
