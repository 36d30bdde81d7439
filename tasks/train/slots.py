"""The slots of the loop: the interface of a method.

A method is one file in its slot's folder under `methods/`, with

- `Method`: a subclass of the slot's Protocol below, so that the type checker compares the two;
- `Settings`, if it has settings: a frozen dataclass of the keys next to `method` in params.yaml. It
  is the first argument of `Method`, and raises ParamsError for an invalid value;
- `EXAMPLE`: settings for the contract tests, if the defaults do not suit them;
- `reads_prompts = True`, if it reads the training prompts: `Method` then gets their table, with
  `prompt_id`, `prompt`, `messages`, `answer`, `verifier`, `source` and `level`, after the slot's
  own arguments;
- `encodes_prompts = True`, if it needs token ids of training prompts: Prompts follow the table;
- `stored_share` (a control) and `stored_candidates` (a replay), if stored rollouts join groups: the
  settings with the share of such groups, and with the number of rollouts scored for each;
- `reads_profile = True`, if it reads the profile's rollouts: `Method` then gets a Profile as its
  last argument. `allocate` writes those rollouts, and profiling is charged to the recipe. A shape
  cannot read it;
- `reads_groups = True` as well, if their number must not depend on their outcomes, as it does with
  `profile.stop`.

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
from tasks.train.data.noise import GradientNoise
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
    """The state of a step when the control is called. With a budget, the run ends with the budget,
    not the plan."""

    rollouts: Rollouts | None  # graded and fresh; None in the first call
    num_requests: int  # made so far in the step
    replayed: int  # size of the replayed part, in the batch's unit
    done: float | None = None  # with a budget: the spent share of its part for steps
    most: int | None = None  # with a budget: limit of this step, in the batch's unit

    def room(self, batch: BatchSettings) -> int:
        """Return the amount to sample in the batch's unit, at least one."""
        room = max(batch.size - self.replayed, 1)
        return room if self.most is None else min(room, self.most)


class Control(Protocol):
    """The choice of the next prompts, and of their numbers of rollouts. Built from the run's plan:
    a method may follow it, or use only its prompts and its number of rollouts."""

    state: Any
    asks_again: bool = False  # a step's rollouts decide whether the step needs more
    needs_stored: bool = False  # stored rollouts join some groups (`GroupRequest.joined`)
    reads_noise: bool = False  # the noise of each update's gradient is measured

    def next(self, so_far: SoFar, rng: np.random.Generator) -> GroupRequest | None:
        """Return the next groups of the step, or more rollouts for its groups. This is called
        again, with the step's rollouts so far, until it returns None. None in a step's first call
        ends the run, and is not allowed with a budget, which ends the run itself."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's fresh rollouts."""

    def observe_noise(self, noise: GradientNoise) -> None:
        """Update the state with the noise of an update's gradient."""

    def rate_factor(self) -> float:
        """Return the factor of the step's learning rate."""
        return 1.0

    def progress(self) -> float:
        """Return the share of the run that is done, for the learning rate."""
        ...

    def describe(self) -> dict[str, float]:
        """Return values to record after a step, by name."""
        return {}


@dataclass(frozen=True)
class Requested:
    """The prompts of a request. A method that passes the unchanged request to the engine may also
    pass `on_ended`: completions are then graded while others are sampled."""

    prompts: pl.DataFrame  # rows of PROMPTS
    prompt_rows: Ints | None  # indices among the training prompts; None in a validation
    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: tuple[int, ...]  # tokens that end a completion
    on_ended: OnEnded | None = None


class Generate(Protocol):
    """The sampling of rollouts from an engine. Built from the number of training prompts."""

    state: Any = None

    def generate(self, engine: Engine, request: Request, requested: Requested) -> Samples:
        """Return the samples of `request`, for the prompts in `requested`. `Samples.is_action` is
        False for tokens of an environment."""
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
    number of rollouts per group, its setting `keep` is that number."""

    features: Features | None = None  # features of the policy that the method reads
    drops_equal: bool = False  # no rollout of a group of equal rewards is kept (also: `drop_dead`)

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether each rollout is kept."""
        ...


class Replay(Protocol):
    """The choice of the rollouts that are stored and trained on again."""

    state: Any = None
    joins: bool = False  # within fresh groups that the control chose, not as separate groups

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
    """The weight of each rollout, or of each token, in the gradient. With `skips_zeros`, the loss's
    denominator must count the rollouts left out (`train.divisor: generated`), and there must be no
    KL term, which would apply to them too."""

    features: Features | None = None  # features of the policy that the method reads
    skips_zeros: bool = False  # the loss leaves out rollouts of advantage 0, as if not selected
    needs_group: bool = True  # advantages are 0 in groups that are too small or of equal rewards
    fresh_only: bool = False  # no replay
    unshaped: bool = False  # no shape that changes rewards
    min_group: int = 2  # size below which `needs_group` applies

    def __call__(self, rollouts: Rollouts) -> Floats:
        """Return [B] advantages of rollouts, or [N] of their completion tokens."""
        ...

    def observe(self, rollouts: Rollouts) -> None:
        """Update the state with the step's rollouts, after their advantages are computed."""


class Shape(Configured, Protocol):
    """A change of rewards before the advantage, or of advantages after it; `train.shape` lists them
    in order. `select`, `control` and the record use the verifier's reward, and outcomes do not
    change. With `cuts_rows`, the loss must be a sum over tokens of independent terms."""

    features: Features | None = None  # features of the policy that the method reads
    changes_rewards: bool = False  # before the advantage
    skips_zeros: bool = False  # as for an advantage
    cuts_rows: bool = False  # the update leaves out tokens after a rollout's last nonzero advantage
    masks: bool = False  # tokens get advantage 0 because they are not to be trained on
    drops_cut: bool = False  # the loss and its divisors leave out completions cut at the limit
    needs_equal: bool = False  # `select` must keep groups of equal rewards
    needs_divisor: bool = False  # its rollouts must be those of the loss's divisor and the update

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
    """The minimised function. `separable` does not apply if the setting `ratio` or `normalize` is
    `sequence`. With `reads_reference`, all kept rollouts have a gradient, even those of advantage
    0."""

    separable: bool = False  # a token's term does not depend on its rollout's other tokens
    normalize: Normalize = "token"  # average of tokens, also in a KL term and an entropy bonus
    entropy: Entropy = Entropy()  # a setting of every loss
    reads_reference: bool = False  # tokens have the log-probabilities of the reference
    needs_teacher: bool = False  # the reference is a teacher, otherwise the initial policy
    needs_several: bool = False  # a batch must have several updates
    multiplies_weights: bool = False  # it uses the product of a rollout's weights of single tokens

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
