"""The proximal policy of stale tokens: the denominator of the clipped ratio (arXiv 2605.12070).

For a stale token, the ratio of policy to sampler has two factors. The first, the policy over the
token's version (both in the trainer), measures staleness and belongs in the clip. The second, the
token's version in the trainer over the same version in the engine, measures mismatch and belongs in
the importance weight (`correction`). `snapshot` computes log-probabilities of a version with a copy
of its weights. `ewma` uses one copy instead: a weighted mean of the weights after each step. It
restarts from the present weights if too many tokens are clipped or outside the bounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tasks.models.sharding import local
from tasks.train.data.columns import Bools
from tasks.train.data.rollouts import Rollouts
from tasks.train.settings import Proximal

MEAN = -1  # in place of a version: the copy of `ewma`

Weights = dict[str, torch.Tensor]


class ProximalPolicy:
    """Copies of the trained weights in main memory: by version (`snapshot`), one mean (`ewma`), or
    none without settings. Each rank copies its own rows."""

    def __init__(self, model: torch.nn.Module, settings: Proximal | None) -> None:
        trained = model.named_parameters()
        self.parameters = {name: part for name, part in trained if part.requires_grad}
        self.settings = settings
        self.copies: dict[int, Weights] = {}
        self.weight = 1.0  # the sum of the weights of `ewma`, by which its mean is divided
        if settings is not None and settings.method == "ewma":
            self.copies[MEAN] = self.present()

    @property
    def is_mean(self) -> bool:
        """Whether there is one copy for all tokens (`ewma`)."""
        return MEAN in self.copies

    def present(self) -> Weights:
        return {name: part.detach().to("cpu", copy=True) for name, part in self.parameters.items()}

    def keep(self, version: int) -> None:
        """With `snapshot`, copy the present weights as `version`, which the engine samples from."""
        if self.settings is not None and not self.is_mean and version not in self.copies:
            self.copies[version] = self.present()

    def forget(self, oldest: int) -> None:
        """Delete copies of versions before `oldest`."""
        for version in [each for each in self.copies if MEAN < each < oldest]:
            del self.copies[version]

    def by_version(self, rollouts: Rollouts, newest: int) -> Iterator[tuple[int, Bools]]:
        """Yield each version whose weights compute old log-probabilities, and the mask [N] of its
        tokens. Tokens whose version has no copy, as in replayed rollouts, count as `newest`."""
        versions_N = rollouts.versions_N()
        if self.is_mean:
            versions_N = np.full_like(versions_N, MEAN)
        known_N = np.isin(versions_N, [*self.copies])
        versions_N = np.where(known_N, versions_N, newest)
        for version in np.unique(versions_N).tolist():
            yield version, versions_N == version

    @contextmanager
    def weights_of(self, version: int) -> Iterator[None]:
        """Replace the present weights with those of `version` inside the context; keep them if
        there is no copy."""
        if version not in self.copies:
            yield
            return
        mine = self.present()
        self.load(self.copies[version])
        try:
            yield
        finally:
            self.load(mine)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        for name, parameter in self.parameters.items():
            local(parameter).copy_(local(weights[name]))

    @torch.no_grad()
    def observe(self, active_share: float) -> None:
        """Update the mean of `ewma` after a step. Restart it if `active_share`, the share of tokens
        affected by neither clip nor bounds, is below `reset_below`."""
        if not self.is_mean or self.settings is None:
            return
        if active_share < self.settings.reset_below:
            self.copies[MEAN], self.weight = self.present(), 1.0
            return
        before, self.weight = self.weight, 1.0 + self.settings.decay * self.weight
        for name, mean in self.copies[MEAN].items():
            part = local(self.parameters[name].detach()).to("cpu")
            local(mean).mul_(self.settings.decay * before / self.weight)
            local(mean).add_(part, alpha=1.0 / self.weight)

    def tensors(self) -> Weights:
        """Return all copies for a checkpoint, by name."""
        return {
            f"proximal.{version}.{name}": tensor
            for version, weights in self.copies.items()
            for name, tensor in weights.items()
        }

    def numbers(self) -> dict[str, Any]:
        """Return the state besides `tensors` for a checkpoint."""
        return {"versions": [*self.copies], "weight": self.weight}

    def restore(self, versions: Sequence[int], weight: float) -> None:
        """Restore `numbers`, and allocate copies into which `tensors` must be written."""
        self.weight, self.copies = weight, {version: self.present() for version in versions}
