"""The check that a server serves the policy, by its name and by the log-probabilities of a probe.

A server under a URL may serve any model. The probe is a short completion at a temperature below 1.
Its log-probabilities are compared token by token with a plain forward of the policy's own files.
This detects other weights, and log-probabilities that are not under the sampling distribution. It
cannot detect differences below a dtype's rounding, or those that affect only other prompts."""

import asyncio
import logging
from typing import Any

import numpy as np
import psutil
import torch

from tasks.common.files import ArtifactError
from tasks.engines.server.endpoints import Completion, CompletionRequest, Connection
from tasks.engines.server.transfer import check_version
from tasks.engines.settings import Sampling
from tasks.models.folder import weight_files
from tasks.models.policy import Policy, load_model, torch_dtype

logger = logging.getLogger(__name__)

# the sampling settings of the probe, and the number of tokens of its prompt
PROBE = Sampling(temperature=0.5, top_p=1.0, top_k=0, max_tokens=16, seed=0)
PROBE_TOKENS = 8
# mean |difference| of a token's log-probability
TOLERANCE = {"float32": 0.002, "bfloat16": 0.1, "float16": 0.02}
# memory needed to load a policy, as a multiple of the size of its files
LOADING_RATE = 1.5


class Identity:
    """Checks that servers serve `policy`. If `trusted`, they were started here from its files."""

    def __init__(self, policy: Policy, dtype: str, *, trusted: bool) -> None:
        self.policy = policy
        self.dtype = dtype
        self.trusted = trusted
        # completions of the probe and their log-probabilities
        self.known: dict[tuple[int, ...], list[float]] = {}

    async def check(
        self, connection: Connection, version: str
    ) -> tuple[dict[str, Any], Completion]:
        """Return the policy's entry in the server's list of models, and the server's completion of
        the probe. Raise ArtifactError if the server serves another policy. Raise Unavailable if it
        does not respond, or was started here and lacks the weights of `version` (empty: any)."""
        url = connection.endpoint.url
        models = {str(model["id"]): model for model in await connection.models()}
        name = self.policy.digest if self.policy.digest in models else next(iter(models))
        if len(models) > 1 and name != self.policy.digest:
            raise ArtifactError(
                f"{url} serves {', '.join(models)}: start it with --served-model-name "
                f"{self.policy.digest} for the policy"
            )
        prompt = [(7 * i + 3) % min(50, self.policy.vocab_size) for i in range(PROBE_TOKENS)]
        completion = await connection.complete(CompletionRequest(name, prompt, PROBE, 0, []))
        if not self.trusted:
            await self.compare(url, name, prompt, completion)
        elif version:
            await check_version(connection, version)
        return models[name], completion

    async def compare(self, url: str, name: str, prompt: list[int], completion: Completion) -> None:
        """Raise ArtifactError if the probe's log-probabilities are not the policy's, or if a policy
        too large to be loaded here is not served under its digest."""
        if not self.fits():
            if name != self.policy.digest:
                raise ArtifactError(
                    f"the policy is too large to load here and compare with {url}: start the "
                    f"server with --served-model-name {self.policy.digest} to confirm that it is "
                    "this policy"
                )
            logger.warning(
                "%s is not checked: the policy is too large to load and compare here", url
            )
            return
        gap, ids = np.inf, completion.token_ids
        if ids and all(0 <= token < self.policy.vocab_size for token in ids):
            expected = await asyncio.to_thread(self.logprobs, prompt, ids)
            gap = float(np.abs(np.subtract(completion.logprobs, expected)).mean())
        if not gap <= TOLERANCE[self.dtype]:
            raise ArtifactError(
                f"{url} serves {name!r}, which is not the policy {self.policy.digest} "
                f"({self.policy.folder}): on a probe their log-probabilities differ by {gap:.3g} a "
                f"token, but engine.dtype {self.dtype} allows {TOLERANCE[self.dtype]:g}. If it is "
                "the same policy, start the server with --logprobs-mode processed_logprobs and the "
                "same --dtype"
            )

    def agrees(self, one: Completion, other: Completion) -> bool:
        """Return whether two servers' completions of the probe are consistent with equal weights.
        If rounding led to different tokens, compare only the tokens before the first difference."""
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        ones, others = one.logprobs[:same], other.logprobs[:same]
        if np.isnan(ones).any():  # a policy that has diverged, which the trainer notices
            return bool(np.isnan(others).any())
        return (
            same > 0 and float(np.mean(np.abs(np.subtract(ones, others)))) <= TOLERANCE[self.dtype]
        )

    def fits(self) -> bool:
        """Return whether the policy can be loaded in this machine's free memory."""
        size = sum(path.stat().st_size for path in weight_files(self.policy.folder))
        return bool(size * LOADING_RATE < psutil.virtual_memory().available)

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        """Return the log-probabilities of `completion` under the policy's own files, at the probe's
        temperature. They are cached for servers that restart."""
        if tuple(completion) not in self.known:
            model = load_model(
                self.policy.folder,
                dtype=torch_dtype(self.dtype),
                device=torch.device("cpu"),
                trust_remote_code=self.policy.trust_remote_code,
            )
            with torch.inference_mode():
                output = model(input_ids=torch.tensor([prompt + completion]))
            # the logits before each completion token, [T, V], then the log-probability of each
            logits = output.logits[0, len(prompt) - 1 : -1]
            logprobs = (logits.float() / PROBE.temperature).log_softmax(-1)
            chosen = logprobs[torch.arange(len(completion)), torch.tensor(completion)]
            self.known[tuple(completion)] = chosen.tolist()
        return self.known[tuple(completion)]
