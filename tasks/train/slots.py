"""The slots of the loop: the interface of a method.

A method is one file in its slot's folder under `methods/`, with

- `Method`: a subclass of the slot's Protocol below, so that the type checker compares the two;
- `Settings`, if it has settings: a frozen dataclass of the keys next to `method` in params.yaml. It
  is the first argument of `Method`, and raises ParamsError for an invalid value;
- `EXAMPLE`: settings for the contract tests, if the defaults do not suit them;
- `reads_prompts = True`, if it reads the training prompts: `Method` then gets their table, with
  `prompt_id`, `prompt`, `messages`, `answer`, `verifier`, `source` and `level`, after the slot's
  own arguments;
- `encodes_prompts = True`, if it needs token ids of training prompts: it then also gets Prompts;
- `stored_share` (a control) and `stored_candidates` (a replay), if stored rollouts join groups: the
  settings with the share of such groups, and with the number of rollouts scored for each;
- `reads_profile = True`, if it reads the profile's rollouts: `Method` then gets a Profile as its
  last argument. `allocate` writes those rollouts, and profiling is charged to the recipe.

The mutable state of a method is in `Method.state`, a dataclass of numbers, arrays and tables, None
for a method without state. A checkpoint contains nothing else of a method. Random generators are
passed to its calls.

Legend: B rollouts of a step, N completion tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl

from tasks.engines.engine import Engine, OnEnded, Request, Samples
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.prompts import GroupRequest
from tasks.train.data.rollouts import Features, Observed, Rollouts, StepTotals
from tasks.train.data.tokens import Gains, Normalize, Tokens, average
from tasks.train.settings import SLOTS, BatchSettings, Entropy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


Score = Callable[[Rollouts], Observed]
"""A function that returns the policy's view of rollouts, and charges the pass as scoring."""


@dataclass(frozen=True)
class SoFar:
    """The state of a step when the control is called: its graded fresh rollouts (None in the first
    call), the number of requests so far, and the size of the replayed part, in the batch's unit.
    With a budget, `done` is the spent share of the budget's part for steps (`Spending.done`),
    `most` limits this step in the batch's unit, and the run ends with the budget, not the plan."""

    rollouts: Rollouts | None
    num_requests: int
    replayed: int
    done: float | None = None
    most: int | None = None

    def room(self, batch: BatchSettings) -> int:
        """Return the amount to sample in the batch's unit, at least one."""
        room = max(batch.size - self.replayed, 1)
        return room if self.most is None else min(room, self.most)


class Control(Protocol):
    """The choice of the next prompts, and of their numbers of rollouts. Built from the run's plan:
    a method may follow it, or use only its prompts and its number of rollouts. With `asks_again`,
    the method inspects a step's rollouts to decide whether the step needs more. With
    `needs_stored`, stored rollouts join some of the step's groups (`GroupRequest.joined`)."""

    state: Any
    asks_again: bool = False
    needs_stored: bool = False

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the next groups of the step, or more rollouts for its groups. This is called
        again, with the step's rollouts so far, until it returns None. None in a step's first call
        ends the run, and is not allowed with a budget, which ends the run itself."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's fresh rollouts."""

    def progress(self) -> float:
        """Return the share of the run that is done, for the learning rate."""
        ...

    def describe(self) -> dict[str, float]:
        """Return values to record after a step, by name."""
        return {}


@dataclass(frozen=True)
class Asked:
    """The prompts of a request: their rows of PROMPTS, and their indices among the training prompts
    (None in a validation); the policy's tokenizer, and the tokens that end its completions. A
    method that passes the unchanged request to the engine may also pass `on_ended`: completions are
    then graded while others are sampled."""

    prompts: pl.DataFrame
    prompt_rows: Ints | None
    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: tuple[int, ...]
    on_ended: OnEnded | None = None


class Generate(Protocol):
    """The sampling of rollouts from an engine. Built from the number of training prompts."""

    state: Any = None

    def generate(self, engine: Engine, request: Request, asked: Asked) -> Samples:
        """Return the samples of `request`, for the prompts in `asked`. `Samples.is_action` is False
        for tokens of an environment."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's fresh rollouts."""


class Configured(Protocol):
    """A method that is built from its settings."""

    settings: Any
    state: Any = None

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings


class Select(Configured, Protocol):
    """The choice of the step's graded rollouts that enter the loss. If a method keeps a fixed
    number of rollouts per group, its setting `keep` is that number. `features` requests features of
    the policy. With `drops_equal`, or the setting `drop_dead`, no rollout of a group of equal
    rewards is kept."""

    features: Features | None = None
    drops_equal: bool = False

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether each rollout is kept."""
        ...


class Replay(Protocol):
    """The choice of the rollouts that are stored and trained on again: as separate groups or, with
    `joins`, within fresh groups that the control chose."""

    state: Any = None
    joins: bool = False

    def add(self, rollouts: Rollouts) -> None:
        """Store some of the step's fresh rollouts."""

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """Return the amount that `draw` will add to the next batch, in the batch's unit; that much
        less is sampled. Batches requested earlier will draw first: `promised` in total."""
        return 0

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """Return stored rollouts to train on, about `room` in the batch's unit, or None."""
        return None

    def join(self, prompt_rows_Q: Ints, score: Score) -> Rollouts:
        """Return stored rollouts of these distinct prompts, with indices into `prompt_rows_Q` as
        `group`; none for a prompt without stored rollouts. Called only with `joins`."""
        ...

    def prepare(self, score: Score) -> None:
        """Compute missing log-probabilities of the initial policy's rollouts. Called before the
        first step, when the trainer can still compute them."""


class Advantage(Configured, Protocol):
    """The weight of each rollout, or of each token, in the gradient. `features` requests the
    policy's view of the rollouts. With `skips_zeros`, rollouts of advantage 0 are left out of the
    loss as if `select` had dropped them. The loss's denominator must then count them
    (`train.divisor: generated`), and there must be no KL term, which would apply to them too. With
    `needs_group`, advantages are 0 in a group with equal rewards or with fewer than `min_group`
    rollouts, unless the method also uses lengths, parts of the reward or a fitted prediction. A
    method with `fresh_only` does not allow replay, and a method with `unshaped` does not allow a
    shape that changes rewards."""

    features: Features | None = None
    skips_zeros: bool = False
    needs_group: bool = True
    fresh_only: bool = False
    unshaped: bool = False
    min_group: int = 2

    def __call__(self, rollouts: Rollouts) -> Floats:
        """Return [B] advantages of rollouts, or [N] of their completion tokens."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's rollouts, after their advantages are computed."""


class Shape(Configured, Protocol):
    """A change of rewards before the advantage, or of advantages after it; `train.shape` lists them
    in order. `select`, `control` and the record use the verifier's reward, and outcomes do not
    change. `features` requests the policy's view of the rollouts, and `skips_zeros` is as for an
    advantage. With `cuts_rows`, the update leaves out the tokens after a rollout's last nonzero
    advantage. The loss must then be a sum over tokens of independent terms. With `masks`, tokens
    get advantage 0 because they are not to be trained on. With `drops_cut`, completions that were
    cut at the token limit are left out of the loss, and their tokens of its divisors. With
    `needs_equal`, `select` must keep groups of equal rewards. With `needs_divisor`, the method's
    rollouts must be those that the loss's divisor counts and the update reads."""

    features: Features | None = None
    changes_rewards: bool = False
    skips_zeros: bool = False
    cuts_rows: bool = False
    masks: bool = False
    drops_cut: bool = False
    needs_equal: bool = False
    needs_divisor: bool = False

    def rewards(self, rollouts: Rollouts, max_tokens: int) -> Floats:
        """Return [B] the rewards; `max_tokens` is the limit of a completion."""
        return rollouts.rewards_B

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        """Return [N] the advantages of the tokens. `rollouts` have the shaped rewards."""
        return advantages_N

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's rollouts, which have the verifier's rewards."""


@dataclass
class Bonus:
    """The coefficient of an entropy bonus with a target, and the mean entropy in the latest
    update."""

    coefficient: float
    entropy: float = np.inf


class Loss(Configured, Protocol):
    """The minimised function. `normalize` sets how tokens are averaged; a KL term and the bonus for
    `entropy` are averaged in the same way. Every loss has the setting `entropy`. With `separable`,
    a token's term does not depend on its rollout's other tokens, unless the setting `ratio` or
    `normalize` is `sequence`. With `reads_reference`, the tokens have the log-probabilities of the
    reference, and all kept rollouts have a gradient, even those of advantage 0; with
    `needs_teacher`, the reference is a teacher, otherwise the initial policy. With `needs_several`,
    a batch must have several updates. With `multiplies_weights`, the loss uses the product of a
    rollout's weights, which must be those of single tokens."""

    separable: bool = False
    normalize: Normalize = "token"
    entropy: Entropy = Entropy()
    reads_reference: bool = False
    needs_teacher: bool = False
    needs_several: bool = False
    multiplies_weights: bool = False

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.normalize = getattr(settings, "normalize", self.normalize)
        self.entropy = getattr(settings, "entropy", self.entropy)
        if self.entropy.target is not None:
            self.state = Bonus(self.entropy.coefficient)

    def __call__(
        self, tokens: Tokens, totals: StepTotals
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """Return a micro-batch's share of the step's loss, and which tokens are `clipped`."""
        gain_N, is_clipped_N = self.gains(tokens)
        return -average(gain_N, tokens, totals, self.normalize), {"clipped": is_clipped_N}

    def gains(self, tokens: Tokens) -> Gains:
        """Return each token's weighted objective [N], whose average is maximised, and whether the
        token is clipped ([N], or a scalar 0 if none ever is). Other losses override `__call__`."""
        raise NotImplementedError

    def rate_factor(self, log_weights_B: Floats, norm: float, reuse: int) -> float:
        """Return the factor of this update's learning rate. `log_weights_B` are the logarithms of
        the importance weights (old policy over sampler, not capped) of all ranks' rollouts, `norm`
        is the gradient norm before clipping, and `reuse` counts the batch's earlier epochs. A
        factor of 0 means no optimizer step; the batch's remaining updates are then skipped."""
        return 1.0

    def marks(self, rollouts: Rollouts) -> Bools | None:
        """Return a mask [N] of the tokens of an update, over all ranks, that the loss treats
        differently (`Tokens.marked_N`); None if there are never any."""
        return None

    def bonus(self) -> float:
        """Return the coefficient of the entropy bonus in the next update."""
        if self.entropy.target is None:
            return self.entropy.coefficient
        return float(self.state.coefficient) if self.is_low() else 0.0

    def is_low(self) -> bool:
        """Return whether the entropy of the latest update is at most the target."""
        return bool(self.state.entropy <= self.entropy.target)

    def observe_entropy(self, entropy: float) -> None:
        """Raise or lower the coefficient of a bonus with a target, depending on the mean entropy of
        an update over all ranks."""
        if self.entropy.target is None:
            return
        self.state.entropy = entropy
        moved = self.state.coefficient + self.entropy.step * (1.0 if self.is_low() else -1.0)
        self.state.coefficient = min(max(moved, 0.0), self.entropy.most)


@dataclass(frozen=True)
class Slots:
    """The methods in the slots of one run."""

    control: Control
    generate: Generate
    select: Select
    replay: Replay
    advantage: Advantage
    loss: Loss
    shape: tuple[Shape, ...] = ()

    @property
    def cuts_rows(self) -> bool:
        """Whether the update leaves out the tokens after a rollout's last nonzero advantage."""
        return any(shape.cuts_rows for shape in self.shape)

    @property
    def drops_cut(self) -> bool:
        """Whether completions that were cut at the token limit are left out of the loss."""
        return any(shape.drops_cut for shape in self.shape)

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by slot; the key of a shape is `shape-` and its position."""
        shapes = {f"shape-{number}": shape for number, shape in enumerate(self.shape)}
        return {**{slot: getattr(self, slot) for slot in SLOTS}, **shapes}

    def states(self) -> dict[str, Any]:
        """Return the methods' states, by slot and field (see `values_of`)."""
        return {
            f"{slot}.{name}": value
            for slot, method in self.methods.items()
            if method.state is not None
            for name, value in values_of(method.state).items()
        }

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the methods' states in place; the inverse of `states`."""
        for name, value in states.items():
            slot, field = name.split(".")
            fill_state(self.methods[slot].state, {field: value})


def values_of(state: Any) -> dict[str, Any]:
    """Return the fields of a method's state by name, as tables and arrays; a number becomes a
    0-dimensional array."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {k: v if isinstance(v, pl.DataFrame) else np.array(v) for k, v in values.items()}


def fill_state(state: Any, values: Mapping[str, Any]) -> None:
    """Set the fields of a method's state; a plain number remains a number."""
    for name, value in values.items():
        is_number = not isinstance(getattr(state, name), np.ndarray | pl.DataFrame)
        setattr(state, name, value.item() if is_number else value)
