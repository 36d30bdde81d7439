"""Whether a server holds the policy that is asked for: by its name, and by the log-probabilities of
a probe.

A server under a URL may serve anything. The probe is a short sample at a temperature, compared
token by token with a plain forward of the policy's own files: it sees other weights, and
log-probabilities that are not of the distribution drawn from. What differs by less than a dtype's
rounding it cannot see, nor a difference that shows only in other text."""

import asyncio
import logging

import psutil
import torch

from tasks.common.files import ArtifactError
from tasks.engines.engine import Sampling
from tasks.engines.server.endpoints import Completion, Connection
from tasks.models.policy import Policy, load_model, torch_dtype

logger = logging.getLogger(__name__)

PROBE = Sampling(temperature=0.5, top_p=1.0, top_k=0, max_tokens=16, seed=0)
PROBE_TOKENS = 8
TOLERANCE = {
    "float32": 0.002,
    "bfloat16": 0.1,
    "float16": 0.02,
}  # mean |difference| of a token's log-probability
ROOM = 1.5  # of its files' size: what a policy takes to load


class Identity:
    """The check of one policy. `trusted` servers were started here from the policy's own files."""

    def __init__(self, policy: Policy, dtype: str, *, trusted: bool) -> None:
        self.policy, self.dtype, self.trusted = policy, dtype, trusted
        self.known: dict[
            tuple[int, ...], list[float]
        ] = {}  # completions of the probe and their log-probabilities

    async def check(self, connection: Connection) -> tuple[str, int | None, str]:
        """The policy's name at the server, the longest context there, the server's fingerprint.
        Raises ArtifactError when the server holds something else, Unavailable when it does not
        answer."""
        url = connection.endpoint.url
        models = {str(model["id"]): model for model in await connection.models()}
        name = choose_model(list(models), self.policy.digest, url)
        prompt = [(7 * i + 3) % 50 for i in range(PROBE_TOKENS)]
        completion, fingerprint = await connection.complete(name, prompt, PROBE, 0, [])
        if not self.trusted:
            await self.compare(url, name, prompt, completion)
        return name, models[name].get("max_model_len"), fingerprint

    async def compare(self, url: str, name: str, prompt: list[int], completion: Completion) -> None:
        if not self.fits():
            if name != self.policy.digest:
                raise ArtifactError(
                    f"the policy is too large to be loaded here and compared with {url}: start the "
                    "server with "
                    f"--served-model-name {self.policy.digest} to say that it is this one"
                )
            logger.warning(
                "%s is taken at its word: the policy is too large to be compared here", url
            )
            return
        expected = await asyncio.to_thread(self.logprobs, prompt, completion.token_ids)
        gap = sum(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) / len(
            expected
        )
        if not gap <= TOLERANCE[self.dtype]:
            raise ArtifactError(
                f"{url} serves {name!r}, which is not the policy {self.policy.digest} "
                f"({self.policy.folder}): on a "
                f"probe their log-probabilities differ by {gap:.3g} a token, over "
                f"{TOLERANCE[self.dtype]:g} for "
                f"engine.dtype {self.dtype}. If it is the same policy, start the server with "
                "--logprobs-mode "
                "processed_logprobs and the same --dtype"
            )

    def fits(self) -> bool:
        """Whether the policy can be loaded into this machine's free memory."""
        size = sum(path.stat().st_size for path in self.policy.folder.glob("*.safetensors"))
        return bool(size * ROOM < psutil.virtual_memory().available)

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        """What the policy's own files say of `completion`; remembered, for a server that comes
        back."""
        if tuple(completion) not in self.known:
            model = load_model(
                self.policy.folder,
                dtype=torch_dtype(self.dtype),
                device=torch.device("cpu"),
                trust_remote_code=self.policy.trust_remote_code,
            )
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[
                    0, len(prompt) - 1 : -1
                ]
            logprobs = (logits.float() / PROBE.temperature).log_softmax(-1)
            self.known[tuple(completion)] = logprobs[
                torch.arange(len(completion)), torch.tensor(completion)
            ].tolist()
        return self.known[tuple(completion)]


def choose_model(names: list[str], digest: str, url: str) -> str:
    """The policy's name among those that a server serves: its digest, else the only one there
    is."""
    if digest in names:
        return digest
    if len(names) > 1:
        raise ArtifactError(
            f"{url} serves {', '.join(names)}: start it with --served-model-name {digest} to say "
            "which is the policy"
        )
    return names[0]
