"""The sections `sampling` and `engine`. This module does not import torch."""

import math
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from tasks import engines
from tasks.common import registry
from tasks.common.params import ParamsError, above_zero, at_least, gathered, settings, share

# options that a user must not set, by the reason
OWN = {
    "the policy determines it": (
        *("model", "served_model_name", "revision", "load_format", "tokenizer"),
        *("tokenizer_mode", "skip_tokenizer_init", "runner", "convert"),
    ),
    "the section sampling determines it": ("generation_config", "override_generation_config"),
    "Winnow chooses the machines, GPUs and ports of its engines": (
        *("distributed_executor_backend", "device_ids", "nnodes", "node_rank", "master_addr"),
        *("master_port", "host", "port", "uds", "data_parallel_rank", "data_parallel_start_rank"),
        *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port"),
        *("data_parallel_hybrid_lb", "data_parallel_external_lb"),
    ),
    "set engine.dtype": ("dtype",),
    "set engine.max_rows": ("max_num_seqs",),
    "set engine.memory_fraction": ("gpu_memory_utilization",),
    "set engine.sleep": ("enable_sleep_mode",),
    "set engine.weight_transfer": ("weight_transfer_config", "worker_extension_cls"),
    "set policy.trust_remote_code": ("trust_remote_code",),
    "parameter files must not contain keys": ("hf_token", "api_key"),
    "each completion has its own seed": ("seed",),
    "training needs the log-probabilities of the sampling distribution": ("logprobs_mode",),
    "the samples of a prompt share its prefill": ("enable_prefix_caching",),
    "seeds need it on a GPU, and prevent it on a CPU": ("enable_chunked_prefill",),
    "the metrics of servers are recorded": ("disable_log_stats",),
    "logs must not contain prompts": ("enable_log_requests",),
}
# the numbers of parts of a server; each part needs a GPU
PARTS = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
# options that change speed and memory, and samples at most by rounding; all others are part of
# every sample's key
NEUTRAL = {
    *PARTS,
    *("max_model_len", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("cpu_offload_gb", "kv_offloading_size", "kv_offloading_backend", "use_tqdm_on_load"),
    *("max_num_batched_tokens", "async_scheduling", "scheduling_policy", "stream_interval"),
    *("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "optimization_level"),
    *("attention_backend", "disable_custom_all_reduce", "enable_expert_parallel"),
}


@settings
class Sampling:
    """The section `sampling`: the settings that a completion depends on, part of every key of the
    rollout store. Temperature 0 is greedy."""

    temperature: float = 1.0  # temperature of the distribution
    top_p: float = 1.0  # probability mass of the nucleus
    top_k: int = 0  # most likely tokens that may be drawn; 0: no limit
    max_tokens: int = 64  # limit on a completion; one that reaches it is `truncated`
    seed: int = 0  # of all samples

    def __post_init__(self) -> None:
        at_least(1, sampling__max_tokens=self.max_tokens)
        at_least(0, sampling__temperature=self.temperature, sampling__top_k=self.top_k)
        share(sampling__top_p=self.top_p)


@settings
class Cluster:
    """`engine.cluster` if it names a Ray cluster."""

    ray: str  # address of its head, host:port
    trainers: int  # training processes, one GPU each
    engines: int  # vLLM servers
    gpus_per_engine: int  # GPUs of each server
    shared: str  # folder shared by all machines, for new weights

    def __post_init__(self) -> None:
        at_least(1, engine__cluster__trainers=self.trainers)
        at_least(0, engine__cluster__engines=self.engines)
        at_least(1, engine__cluster__gpus_per_engine=self.gpus_per_engine)


@settings
class EngineSettings:
    """The section `engine`: how completions are computed. Keys of the rollout store contain only
    those options in `vllm` that change samples beyond rounding, such as a quantization."""

    name: str = "auto"  # hf | vllm | server | auto: vllm if it is installed and there is a GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of sampling and training
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the sampler's weights
    max_rows: int = 256  # rollouts decoded at once; with servers: requests in flight at each
    memory_fraction: float = 0.5  # share of the GPU's memory (vllm)
    sleep: bool = True  # in training on a GPU: vLLM frees its memory for the update
    threads: int = 1  # CPU threads of a stage; 1 if cores are shared
    num_processes: int = 1  # processes of data parallel training, one per GPU
    cluster: Cluster | Literal["local"] = "local"  # or a mapping: a Ray cluster
    urls: list[str] = []  # server: OpenAI-compatible endpoints; the key is in OPENAI_API_KEY
    num_replicas: int = 1  # server without urls: vLLM servers on this machine, one per GPU
    weight_transfer: Literal["file", "delta", "nccl"] = "file"  # how servers get new weights
    vllm: dict[str, Any] = {}  # more options of vLLM's engines, by the names of its arguments
    max_retries: int = 8  # server: retries of a request, or failures of a server in a row
    timeout_seconds: float = 600.0  # server: limit on one request

    def __post_init__(self) -> None:
        at_least(
            1,
            engine__threads=self.threads,
            engine__num_processes=self.num_processes,
            engine__num_replicas=self.num_replicas,
            engine__max_rows=self.max_rows,
        )
        at_least(0, engine__max_retries=self.max_retries)
        above_zero(engine__timeout_seconds=self.timeout_seconds)
        share(engine__memory_fraction=self.memory_fraction)
        if self.name != "auto":
            registry.check(engines, self.name, "engine.name")
        for url in self.urls:
            parse_url(url)
        if self.urls and self.num_replicas > 1:
            raise ParamsError(
                "engine.urls names servers and engine.num_replicas starts them: set one of the two"
            )
        self.check_vllm()
        self.check_cluster()
        if self.name not in ("auto", "server") and (self.urls or self.num_replicas != 1):
            raise ParamsError(
                "engine.urls and engine.num_replicas apply to the engine server, but engine.name "
                f"is {self.name}: set it to server, or leave urls empty and num_replicas at 1"
            )

    def check_vllm(self) -> None:
        """Raise ParamsError for options in `vllm` that the engine ignores or that Winnow sets, and
        if one of PARTS is not a positive int."""
        with gathered() as problems:
            for reason, names in OWN.items():
                for name in (name for name in names if name in self.vllm):
                    problems.add(f"engine.vllm.{name} cannot be set: {reason}")
            for name in PARTS:
                num = self.vllm.get(name, 1)
                if type(num) is not int or num < 1:
                    problems.add(f"engine.vllm.{name} is {num!r}; it must be at least 1")
        if self.vllm and (self.name not in ("vllm", "server") or self.urls):
            raise ParamsError(
                "engine.vllm applies to the engine vllm, and to servers that Winnow starts: set "
                "engine.name to vllm, or to server with empty engine.urls"
            )
        if self.name == "vllm" and self.num_parts > 1:
            raise ParamsError(
                f"engine.vllm: {', '.join(PARTS)} need servers: set engine.name to server"
            )

    def check_cluster(self) -> None:
        """Raise ParamsError for settings that are incompatible with a cluster."""
        if self.cluster == "local":
            return
        if self.urls or self.num_replicas != 1 or self.num_processes != 1:
            raise ParamsError(
                "engine.cluster sets the numbers of trainers and servers: leave "
                "engine.num_processes and engine.num_replicas at 1 and engine.urls empty"
            )
        if self.cluster.engines and self.name not in ("auto", "server"):
            raise ParamsError(
                f"engine.cluster.engines is {self.cluster.engines}, which are vLLM servers, but "
                f"engine.name is {self.name}: set it to server or auto, or engines to 0"
            )
        num_gpus, is_split = self.cluster.gpus_per_engine, "tensor_parallel_size" in self.vllm
        if num_gpus != self.num_parts if is_split else num_gpus % self.num_parts:
            raise ParamsError(
                f"engine.cluster.gpus_per_engine is {num_gpus}, which must be "
                f"{'equal to' if is_split else 'a multiple of'} the {self.num_parts} parts of a "
                "server in engine.vllm"
            )
        if not self.cluster.engines and self.name == "server":
            raise ParamsError("engine.name is server, but engine.cluster.engines is 0: raise it")

    @property
    def altering(self) -> dict[str, Any]:
        """{"vllm": options that can change samples beyond rounding}, or an empty dict if there are
        none. They are part of every sample's key."""
        found = {name: self.vllm[name] for name in sorted(self.vllm) if name not in NEUTRAL}
        return {"vllm": found} if found else {}

    @property
    def num_parts(self) -> int:
        """The number of parts that `engine.vllm` splits a server into; each needs a GPU."""
        return math.prod(self.vllm.get(name, 1) for name in PARTS)

    @property
    def num_server_gpus(self) -> int:
        """The number of GPUs that all local servers need together."""
        return self.num_replicas * self.num_parts

    @property
    def has_servers(self) -> bool:
        """Whether the engine is `server`, by its name or, for `auto`, by the other settings."""
        others = self.urls or self.num_replicas > 1 or self.has_cluster_engines
        return self.name == "server" or (self.name == "auto" and bool(others))

    @property
    def has_cluster_engines(self) -> bool:
        """Whether vLLM servers run on the machines of a cluster."""
        return self.cluster != "local" and self.cluster.engines > 0


def parse_url(url: str) -> str:
    """Return `url` as a server's base URL, with the path `/v1` if it has none. Raise ParamsError if
    it is not an HTTP URL, or contains credentials, a query or a fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:  # of brackets without an IPv6 address
        parts = urlsplit("")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ParamsError(
            "an entry of engine.urls contains credentials or a query: set OPENAI_API_KEY instead"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ParamsError(  # without the value: it may contain a password
            "an entry of engine.urls is not a URL like http://127.0.0.1:8000/v1"
        )
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1"))
