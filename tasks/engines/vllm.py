"""vLLM in this process: sampling on a GPU, or on a CPU with vLLM's CPU build.

Every completion is a separate request with its own seed. Prefix caching computes the prefill of a
prompt once for all its completions, in whole blocks of the cache. During an update on a GPU the
engine sleeps (`engine.sleep`): weights move to main memory, and the cache's memory is freed. For
engines in other processes and on other machines see `server`."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.engines.engine import IsEnough, OnEnded, Request, Samples, check_for_vllm, never
from tasks.engines.options import checked, own_options
from tasks.engines.settings import EngineSettings
from tasks.engines.weights.vllm_model import HEAD, check_updates, has_head, pack_experts
from tasks.models.policy import Policy, load_tokenizer, stop_token_ids, torch_device
from tasks.models.weights import as_saved

# variables that vLLM reads when it is imported
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are replaced in this process's memory
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class VllmEngine:
    """vLLM's offline engine for one policy."""

    name = "vllm"
    shares_weights = False

    def __init__(self, settings: EngineSettings, policy: Policy, *, trains: bool) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        try:
            import vllm
        except ImportError as error:
            raise ArtifactError(
                "engine.name is vllm, but it is not installed: install the extra `gpu` (or `cpu`), "
                "or set it to hf"
            ) from error
        self.vllm = vllm
        self.version = str(vllm.__version__)
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.on_gpu = torch_device(settings.device).type == "cuda"
        self.can_sleep = trains and settings.sleep and self.on_gpu
        self.asleep = False
        own = own_options(settings, policy, on_gpu=self.on_gpu) | {
            "distributed_executor_backend": executor(),
            "skip_tokenizer_init": True,
            "enable_sleep_mode": self.can_sleep,
        }
        self.llm = vllm.LLM(**checked(own, settings.vllm), disable_log_stats=True)
        config = self.llm.llm_engine.vllm_config
        self.prefix_block = int(config.cache_config.block_size)
        self.max_length = int(config.model_config.max_model_len)

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        return self.decode(request, never(on_ended), "FINAL_ONLY")

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        # a stopped completion has no final output, so each step must return its token
        return self.decode(request, is_enough, "DELTA")

    def decode(self, request: Request, is_enough: IsEnough, kind: str) -> Samples:
        """Sample until all rows end or `is_enough` returns True. `kind` is a RequestOutputKind."""
        check_for_vllm(request, self.max_length)
        owners = request.owner_B().tolist()
        samples = Samples([[] for _ in owners], [[] for _ in owners], ["abort"] * len(owners))
        self.wake()
        engine, vllm = self.llm.llm_engine, self.vllm
        going, has_enough = set[int](), False
        try:
            for row, params in enumerate(self.sampling_params(request)):
                params.output_kind = vllm.sampling_params.RequestOutputKind[kind]
                ids = list(request.prompts[owners[row]])
                engine.add_request(str(row), vllm.inputs.TokensPrompt(prompt_token_ids=ids), params)
                going.add(row)
            while going and not has_enough:
                outputs: list[Any] = engine.step()
                for output in outputs:
                    row, (completion,) = int(output.request_id), output.outputs
                    samples.token_ids[row].extend(completion.token_ids)
                    samples.logprobs[row].extend(chosen_logprobs(completion))
                    if output.finished:
                        going.remove(row)
                        samples.finish_reasons[row] = reason = str(completion.finish_reason)
                        has_enough |= is_enough(row, samples.token_ids[row], reason)
        finally:
            engine.abort_request([str(row) for row in going])
        return samples

    def sampling_params(self, request: Request) -> list[Any]:
        """Return the parameters of each completion. Completions end at the policy's stop tokens,
        as in every engine."""
        sampling = request.sampling
        return [
            self.vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens - written,
                seed=seed,
                logprobs=0 if request.with_logprobs else None,
                stop_token_ids=self.stop_ids,
                ignore_eos=True,
                detokenize=False,
            )
            for seed, written in zip(request.own_seeds(), request.written_B().tolist(), strict=True)
        ]

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the weights into the running model, and clear the old policy's prefix cache.

        `weights` must include tied weights (`NamedWeights` does): vLLM keeps a packed copy of the
        output head. Raise ArtifactError if vLLM rejects the weights, and RuntimeError if it fails
        to clear the prefix cache."""
        self.wake()
        (takes_head,) = self.llm.apply_model(has_head)
        named = (each for each in as_saved(weights) if takes_head or each[0] != f"{HEAD}.weight")
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        except (AttributeError, KeyError, ValueError) as error:
            raise ArtifactError(
                f"vLLM {self.version} does not accept new weights of this policy, so it cannot "
                f"sample in training: set engine.name to hf. The reason: {error}"
            ) from error
        if not self.on_gpu:
            self.llm.apply_model(pack_experts)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: it would use the old policy's keys"
            )

    def metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        """Move the weights to main memory and free the GPU's memory, until `wake`."""
        if self.can_sleep and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        """If asleep, free the trainer allocator's cached memory, then undo `sleep`."""
        if self.asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.llm.wake_up()
            self.asleep = False


def executor() -> str:
    """Return vLLM's executor: `external_launcher` if there are several ranks, else `uni`. Both run
    the model in this process. `external_launcher` uses the GPU of LOCAL_RANK, like the trainer, and
    samples without the other ranks; `uni` would use the first GPU in every process."""
    return "external_launcher" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "uni"


def chosen_logprobs(completion: Any) -> list[float]:
    """Return the log-probability of each sampled token; an empty list if they were not
    requested."""
    if completion.logprobs is None:
        return []
    return [
        position[token].logprob
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> VllmEngine:
    """Return the engine for `policy`. It does not share the trainer's `model`; `set_weights` loads
    new weights. Raise ArtifactError if vLLM cannot replace all weights of `model`."""
    if model is not None:
        check_updates(model)
    return VllmEngine(settings, policy, trains=model is not None)
