"""An engine for tests: the whole engine contract, with a made-up distribution instead of a model.

The logits of the next token are a hash of the weights and of all tokens before it. So completions
are cheap, differ between policies and prompts, and change with the weights. The engine requires
WINNOW_FAKE_ENGINE=1: the rollout store does not distinguish engines, and must not contain made-up
completions."""

import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError, read_json
from tasks.engines.choosing import choose, hashed_uniforms
from tasks.engines.engine import IsEnough, Request, Samples, StoppableEngine, check_lengths
from tasks.engines.settings import EngineSettings
from tasks.models.policy import Policy, load_tokenizer, stop_token_ids
from tasks.models.weights import as_saved

States = npt.NDArray[np.uint64]
LOGIT_RANGE = 8.0  # logits are between 0 and this
STOP_BIAS = 2.0  # completions have about ten tokens with a vocabulary of a hundred


class FakeEngine(StoppableEngine):
    """An engine that samples from `next_logits`. `names` are the weights in the policy's files;
    their digest is the seed."""

    name = "fake"
    version = "1"
    prefix_block = 1
    shares_weights = False

    def __init__(self, policy: Policy) -> None:
        weights = {
            k: v for path in policy.folder.glob("*.safetensors") for k, v in load_file(path).items()
        }
        tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
        self.names = sorted(weights)
        self.max_length = policy.max_length
        self.prefilled_tokens = 0
        self.vocab_size = int(read_json(policy.folder / "config.json")["vocab_size"])
        self.stop_ids = list(stop_token_ids(policy.folder, tokenizer))
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample from the distribution of `weights` from now on."""
        saved = dict(as_saved(weights))
        self.seed = weights_seed({name: saved[name] for name in self.names})

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        prompts = request.prompts
        sampling = request.sampling
        check_lengths(request, self.max_length)
        self.prefilled_tokens += sum(
            len(prompt) for prompt, count in zip(prompts, request.counts, strict=True) if count
        )
        owners = request.owner_B()
        prefixes = np.array([prefix_state(self.seed, prompt) for prompt in prompts], np.uint64)
        states = prefixes[owners]
        uniforms = torch.from_numpy(hashed_uniforms(request.seeds, sampling.max_tokens))
        samples = Samples([[] for _ in owners], [[] for _ in owners], ["abort"] * len(owners))
        rows, places = np.arange(len(owners)), request.written_B()
        has_enough = False
        while len(rows) and not has_enough:
            logits = next_logits(states[rows], self.vocab_size, self.stop_ids)
            tokens, logprobs = choose(logits, uniforms[rows, places[rows], None], sampling)
            stopped = self.keep(samples, rows, tokens[:, 0].tolist(), logprobs[:, 0].tolist())
            states[rows] = advance(states[rows], tokens[:, 0].numpy())
            places[rows] += 1
            is_full = places[rows] == sampling.max_tokens
            for row in rows[is_full & ~stopped].tolist():
                samples.finish_reasons[row] = "length"
            for row in rows[is_full | stopped].tolist():
                has_enough |= is_enough(row, samples.token_ids[row], samples.finish_reasons[row])
            rows = rows[~(is_full | stopped)]
        return samples

    def keep(
        self,
        samples: Samples,
        rows: npt.NDArray[np.int64],
        tokens: list[int],
        logprobs: list[float],
    ) -> npt.NDArray[np.bool]:
        """Append a token to each of `rows`. Return a mask of the rows that ended."""
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            samples.token_ids[row].append(token)
            samples.logprobs[row].append(logprob)
            if token in self.stop_ids:
                samples.finish_reasons[row] = "stop"
        return np.isin(tokens, self.stop_ids)


def weights_seed(weights: Mapping[str, torch.Tensor]) -> int:
    """Return a 64-bit digest of the weights' names and values."""
    content = hashlib.sha256()
    for name in sorted(weights):
        content.update(name.encode())
        values = weights[name].detach().cpu().contiguous().reshape(-1)
        content.update(values.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(content.digest()[:8], "big")


def advance(states_B: States, tokens_B: npt.NDArray[np.int64]) -> States:
    """Return the states [B] of the prefixes after one more token each."""
    with np.errstate(over="ignore"):
        mixed = (states_B ^ tokens_B.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(mixed ^ (mixed >> np.uint64(29)))


def prefix_state(seed: int, tokens: Sequence[int]) -> int:
    """Return a hash of the weights and all tokens so far, which determines the next logits."""
    state = np.array([seed], dtype=np.uint64)
    for token in tokens:
        state = advance(state, np.array([token]))
    return int(state[0])


def next_logits(states_B: States, vocab_size: int, stop_ids: Sequence[int]) -> torch.Tensor:
    """Return logits [B, V] between 0 and LOGIT_RANGE, plus STOP_BIAS for the stop tokens."""
    logits = torch.from_numpy(LOGIT_RANGE * hashed_uniforms(states_B.tolist(), vocab_size)).float()
    logits[:, list(stop_ids)] += STOP_BIAS
    return logits


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> FakeEngine:
    """Return the engine for `policy`. It uses only the bytes of the policy's weights, its
    vocabulary and its stop tokens."""
    if os.environ.get("WINNOW_FAKE_ENGINE") != "1":
        raise ArtifactError(
            "engine.name fake makes up its completions, for tests only (WINNOW_FAKE_ENGINE=1): set "
            "engine.name to hf, vllm or server"
        )
    return FakeEngine(policy)
