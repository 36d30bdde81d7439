"""The section `engine`, vLLM's own options in it, and vLLM's errors."""

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.common.params import ParamsError, parse
from tasks.engines import options
from tasks.engines.loading import LEAST_LENGTH, engine_name, load_engine
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy
from tests.policies import ENGINE

CLUSTER: dict[str, Any] = {
    "ray": "head:6379",
    "trainers": 2,
    "engines": 1,
    "gpus_per_engine": 4,
    "shared": "/shared",
}
PARTS = {"data_parallel_size": 2, "pipeline_parallel_size": 2}


def settings(**changes: Any) -> EngineSettings:
    return parse({"name": "server", **changes}, EngineSettings, "engine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": {"dtype": "half"}}, r"^engine.vllm.dtype cannot be set: set engine.dtype$"),
        ({"vllm": {"model": "m", "uds": "s"}}, r"vllm.model cannot(.|\n)*vllm.uds cannot be set"),
        ({"vllm": {"data_parallel_size": "2"}}, "data_parallel_size is '2'; it must be at least 1"),
        ({"name": "hf", "vllm": {"block_size": 16}}, "engine.vllm applies to the engine vllm"),
        ({"urls": ["http://a/v1"], "vllm": {"block_size": 16}}, "with empty engine.urls"),
        ({"name": "vllm", "vllm": {"tensor_parallel_size": 2}}, "need servers: set engine.name"),
        ({"name": "hf", "num_replicas": 2}, "engine.urls and engine.num_replicas .* is hf"),
        ({"urls": ["http://a/v1"], "num_replicas": 2}, "set one of the two"),
        ({"num_replicas": 0}, "num_replicas is 0"),
        ({"max_rows": 0}, r"engine\.max_rows is 0; it must be at least 1"),
        ({"cluster": {**CLUSTER, "trainers": 0}}, r"engine\.cluster\.trainers is 0"),
        ({"cluster": "here"}, "engine.cluster is 'here'; allowed: local"),
        ({"cluster": {"ray": "head:6379"}}, "engine.cluster"),
        ({"cluster": {**CLUSTER, "engines": 0}}, "engine.cluster.engines is 0: raise it"),
        ({"cluster": CLUSTER, "name": "hf"}, "cluster.engines is 1, which are vLLM servers"),
        ({"cluster": CLUSTER, "num_processes": 2}, "leave engine.num_processes and engine.num_rep"),
        ({"cluster": CLUSTER, "urls": ["http://a/v1"]}, "engine.urls empty"),
        ({"cluster": {**CLUSTER, "gpus_per_engine": 6}, "vllm": PARTS}, "multiple of the 4 parts"),
        ({"cluster": CLUSTER, "vllm": {"tensor_parallel_size": 2}}, "be equal to the 2 parts"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        settings(**changes)


def test_auto_chooses_servers_if_they_are_set() -> None:
    for changes in ({"urls": ["http://host"]}, {"num_replicas": 2}, {"cluster": CLUSTER}):
        assert engine_name(settings(name="auto", **changes)) == "server"
    assert engine_name(settings(name="auto", cluster={**CLUSTER, "engines": 0})) != "server"


@pytest.mark.parametrize(("longest", "expected"), [(100, 100), (3, LEAST_LENGTH), (9999, 512)])
def test_context_of_an_engine_fits_the_longest_sample(
    policy: Policy, longest: int, expected: int
) -> None:
    assert load_engine(ENGINE, policy, longest=longest).max_length == expected  # type: ignore[attr-defined]


@pytest.mark.vllm
def test_arguments_of_a_server_are_the_given_options(policy: Policy) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils import argparse_utils

    given = {
        **options.own_options(ENGINE, policy, on_gpu=False),
        "compilation_config": {"cudagraph_mode": "NONE"},
        "cudagraph_capture_sizes": [1, 2],
        "quantization": "fp8",
        "kv_cache_memory_bytes": None,
    }
    parser = AsyncEngineArgs.add_cli_args(argparse_utils.FlexibleArgumentParser())
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(options.as_arguments(given)))
    mode = given.pop("compilation_config")["cudagraph_mode"]
    assert parsed.compilation_config.cudagraph_mode.name == mode
    assert {name: getattr(parsed, name) for name in given} == given


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantizaton": "fp8"}, r"vllm.quantizaton is not an option of vLLM .*; did you mean qu"),
        (
            {"block_size": 16, "quantization": "fp7"},
            r"is 'fp7', which .* refuses: did you mean fp8",
        ),
        ({"max_model_len": "x"}, "engine.vllm.max_model_len is 'x', .* a valid integer"),
        ({"compilation_config": {"mde": 3}}, "refuses: mde: Unexpected keyword argument"),
    ],
)
def test_vllms_refusal_is_one_sentence(policy: Policy, given: dict[str, Any], message: str) -> None:
    own = options.own_options(ENGINE, policy, on_gpu=False)
    before = dict(os.environ)
    with pytest.raises(ParamsError, match=message) as error:
        options.checked(own, given)
    assert "\n" not in str(error.value)
    assert dict(os.environ) == before


@pytest.mark.vllm
def test_users_options_replace_winnows(policy: Policy, tmp_path: Path) -> None:
    own = options.own_options(ENGINE, policy, on_gpu=False)
    given = {"max_model_len": 128, "block_size": 16, "data_parallel_size": 2}
    assert options.checked(own, given) == {**own, **given}
    elsewhere = {**own, "model": str(tmp_path)}  # as for servers on other machines
    assert options.checked(elsewhere, {"block_size": 16}) == {**elsewhere, "block_size": 16}
