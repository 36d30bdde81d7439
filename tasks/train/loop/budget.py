"""Spending of a run's budget: its steps so far, and the next step's limit.

While batches are in flight, their cost is predicted from the newest steps, and either a whole batch
or none is requested. Otherwise the remaining budget limits the size of the next batch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.common.accounting.spending import CellBudget

NUM_COSTS = 8  # newest steps that predict the cost of the next one
STORED = ("spent", "observed", "before", "costs", "steps")  # in a checkpoint


@dataclass
class RunBudget:
    """The spent part of the `cell`'s budget: `spent` by the profile, a warm start and all steps,
    and `before` by the time of the first step. Requests depend only on `observed`: `spent` without
    the `steps` (cost and size of each) that the control has yet to observe. `costs` are those of
    the newest observed steps per rollout or per prompt (the batch's unit); `size` is the size of a
    batch in this unit; `passes` is the cost of the next step's passes over stored rollouts."""

    cell: CellBudget
    size: int
    spent: float = field(init=False)
    observed: float = field(init=False)
    before: float = field(init=False)
    costs: list[float] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    passes: float = 0.0

    def __post_init__(self) -> None:
        self.spent = self.observed = self.before = self.cell.profile

    @property
    def first_share(self) -> float:
        """The share that was spent before the first step."""
        return self.before / self.cell.amount

    @property
    def share(self) -> float:
        """The spent share, after all steps so far."""
        return min(self.spent / self.cell.amount, 1.0)

    def spend_before(self, cost: float) -> None:
        """Count the cost of a warm start, before the first step."""
        self.spend(cost)
        self.before += cost

    def spend(self, cost: float) -> None:
        """Count a cost that is no step's."""
        self.spent += cost
        self.observed += cost

    def add_step(self, cost: float, size: int) -> None:
        """Count a step of this cost and target size, with the passes since the step before."""
        self.steps.append((self.passes + cost, size))
        self.spent += self.steps[-1][0]
        self.passes = 0.0

    def observe_step(self) -> None:
        """Let requests depend on the oldest step that they do not depend on yet."""
        cost, size = self.steps.pop(0)
        self.observed += cost
        self.costs = [*self.costs, cost / max(size, 1)][-NUM_COSTS:]

    def predicted(self, num_ahead: int) -> float:
        """Return the predicted spending after `num_ahead` batches that are not observed yet."""
        mean = sum(self.costs) / max(len(self.costs), 1)
        return self.observed + num_ahead * mean * self.size

    def progress(self, num_ahead: int) -> float:
        """Return the share of the whole budget predicted to be spent after `num_ahead` batches."""
        return min(self.predicted(num_ahead) / self.cell.amount, 1.0)

    def done(self, num_ahead: int) -> float:
        """Return `progress` with `before` subtracted from both spending and budget."""
        trained = self.predicted(num_ahead) - self.before
        return min(trained / (self.cell.amount - self.before), 1.0)

    def is_over(self, num_ahead: int) -> bool:
        """Return whether the budget left after `num_ahead` batches is too small for a step of one
        unit, or of a whole batch if `num_ahead` is above 0."""
        least = max(self.costs, default=0.0) * (self.size if num_ahead else 1)
        left = self.cell.amount - self.predicted(num_ahead)
        return left <= 0.0 or left < least

    def most(self, num_ahead: int) -> int:
        """Return the limit of the next step in the batch's unit: `size` or, with no batches ahead,
        the amount that the budget left buys at the newest steps' highest cost, if that is less."""
        if num_ahead or not self.costs:
            return self.size
        return min(self.size, int((self.cell.amount - self.observed) / max(self.costs)))

    def numbers(self) -> dict[str, Any]:
        """Return the state as JSON for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name in STORED}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        for name in STORED:
            setattr(self, name, numbers[name])
