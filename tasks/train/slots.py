"""The slots of the loop: what a method must offer.

A method is one file in its slot's folder under `methods/`. It holds

- `Method`: a subclass of the slot's Protocol below, so that the type checker compares the two;
- `Settings`, where it has settings: a frozen dataclass with the keys that params.yaml gives beside
  `method`. It is `Method`'s first argument, and raises ParamsError for a value that makes no sense;
- `EXAMPLE`, with `Settings`: settings that make sense, which the contract tests use.

- `reads_prompts = True`, where it wants to know the training prompts: an argument of `Method` after
  the slot's own, their table (`prompt_id`, `prompt`, `messages`, `answer`, `verifier`, `source`,
  `level`);

- `reads_profile = True`, where it wants the profile's rollouts: `Method`'s last argument (Profile),
  written by `allocate` and charged to the recipe.

What changes during a run is in `Method.state`, a dataclass of numbers and arrays, None where there
is nothing to remember. It is all that a checkpoint keeps of a method. Randomness is handed in.

Legend: B rollouts of a step, N completion tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, OnEnded, Request, Samples
from tasks.train.rollouts import (
    Bools,
    Features,
    Floats,
    GroupRequest,
    Ints,
    Rollouts,
    StepTotals,
)
from tasks.train.settings import BatchSettings
from tasks.train.tokens import Normalize, Tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SoFar:
    """A step when control is asked: its graded fresh rollouts (None before the first request), how
    many requests they answer, and how much replay gives to the step, in the batch's unit. With a
    budget `done` is the share of it that is spent, and `most` what it leaves for the step, in the
    batch's unit; control then goes on until it is not asked again."""

    rollouts: Rollouts | None
    num_requests: int
    replayed: int
    done: float | None = None
    most: int | None = None

    def room(self, batch: BatchSettings) -> int:
        """How much is to be sampled, at least one."""
        room = max(batch.size - self.replayed, 1)
        return room if self.most is None else min(room, self.most)


class Control(Protocol):
    """Which prompts are sampled next, and how often. Made with the run's plan, which it may walk
    along or take as the pool of prompts and the budget. One that `asks_again` decides by a step's
    rollouts whether the step needs more."""

    state: Any
    asks_again: bool = False

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """The next groups of the step, or more rollouts of groups that it has. Asked again, with
        what was sampled, until None; None at once means that the run is at its end. A budget ends
        the run itself: with one there is always a next group (`SoFar.done`)."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Learn from the step's fresh rollouts."""

    def progress(self) -> float:
        """The share of the run that is done, for the learning rate."""
        ...

    def describe(self) -> dict[str, float]:
        """What is worth recording after a step."""
        return {}


@dataclass(frozen=True)
class Asked:
    """The prompts of a request: their rows of PROMPTS (`prompt`, `messages`, `answer`), which
    training prompts they are, None for others; the policy's tokenizer, and every token that ends a
    completion of it. A method that asks the engine for exactly the request may have it call
    `on_ended`: what has ended is judged while others are sampled."""

    prompts: pl.DataFrame
    prompt_rows: Ints | None
    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: tuple[int, ...]
    on_ended: OnEnded | None = None


class Generate(Protocol):
    """How an engine is asked for rollouts. Made with the number of training prompts."""

    state: Any = None

    def generate(self, engine: Engine, request: Request, asked: Asked) -> Samples:
        """The samples of `request`, which is about the prompts `asked`. Tokens that an environment
        wrote are marked (`Samples.is_action`)."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Learn from the step's fresh rollouts."""


class Select(Protocol):
    """Which of the step's graded rollouts enter the loss. One that keeps a fixed number of every
    group takes it as its setting `keep`; `features` asks to see the policy's view of the
    rollouts."""

    state: Any = None
    features: Features | None = None

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """[B] whether a rollout is kept."""
        ...


class Replay(Protocol):
    """Which rollouts are kept and trained on again."""

    state: Any = None

    def add(self, rollouts: Rollouts) -> None:
        """Keep what is wanted of the step's fresh rollouts."""

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """How much of the next batch `draw` will give, in the batch's unit; the fresh share shrinks
        by that. As much as `promised` will be drawn before it, by batches that are asked for."""
        return 0

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """Rollouts to train on beside the step's fresh ones, as many as `room` said."""
        ...

    def unscored(self) -> Rollouts | None:
        """Rollouts of the initial policy without log-probabilities. Asked before the first step,
        when the trainer can still compute them."""
        return None

    def score(self, logprobs_N: Floats) -> None:
        """Take the log-probabilities of the completion tokens of what `unscored` gave."""


class Advantage(Protocol):
    """What each rollout, or each token, weighs in the gradient. `features` asks to see the policy's
    view of the rollouts. With `skips_zeros` rollouts of advantage 0 leave the loss, as if `select`
    had dropped them; what the loss divides by must then not depend on it (`train.divisor:
    generated`), and there must be no KL term, which concerns them too. One that `needs_group` gives
    exactly 0 in a group whose rewards are all equal, and so in a group of one; others have a
    baseline from elsewhere. One that is `fresh_only` is wrong for replayed rollouts."""

    state: Any = None
    features: Features | None = None
    skips_zeros: bool = False
    needs_group: bool = True
    fresh_only: bool = False

    def __call__(self, rollouts: Rollouts) -> Floats:
        """[B] advantages of rollouts, or [N] of their completion tokens."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Learn from the step's rollouts, after their advantages were taken."""


class Loss(Protocol):
    """What is minimised. `normalize` says how its tokens are averaged; a KL term is averaged
    likewise."""

    state: Any = None
    normalize: Normalize

    def __call__(
        self, tokens: Tokens, totals: StepTotals
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """A micro-batch's share of the step's loss, and sums over its tokens (`clipped`)."""
        ...

    def rate_factor(self, log_weights_B: Floats) -> float:
        """What the learning rate of this update is multiplied by, from the logarithms of its
        rollouts' importance weights (old policy over sampler, not capped), of all ranks."""
        return 1.0


@dataclass(frozen=True)
class Slots:
    """The methods of one run."""

    control: Control
    generate: Generate
    select: Select
    replay: Replay
    advantage: Advantage
    loss: Loss

    def states(self) -> dict[str, Arrays]:
        """What the methods remember, by slot; slots without state are left out."""
        methods = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: arrays_of(method.state)
            for name, method in methods.items()
            if method.state is not None
        }

    def restore(self, states: Mapping[str, Arrays]) -> None:
        """The inverse of `states`, in place."""
        for name, arrays in states.items():
            fill_state(getattr(self, name).state, arrays)


def arrays_of(state: Any) -> Arrays:
    """The fields of a method's state as arrays."""
    return {field.name: np.array(getattr(state, field.name)) for field in fields(state)}


def fill_state(state: Any, arrays: Arrays) -> None:
    """Set the fields of a method's state; those that hold a plain number get one back. Raises
    ArtifactError where a field is not there."""
    for field in fields(state):
        if field.name not in arrays:
            raise ArtifactError(
                f"the checkpoint has no {field.name!r} in a method's state: other code wrote it. "
                "Delete it to start the run anew"
            )
        value = arrays[field.name]
        is_array = isinstance(getattr(state, field.name), np.ndarray)
        setattr(state, field.name, value if is_array else value.item())
