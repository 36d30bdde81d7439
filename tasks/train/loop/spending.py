"""A run's progress through its budget: the cost of its steps so far, and the next step's limit.

While batches are in flight, their cost is predicted from the newest steps, and either a whole batch
or none is requested. Otherwise the remaining budget limits the size of the next batch."""

from dataclasses import dataclass, field

from tasks.common.accounting.spending import CellBudget

NUM_COSTS = 8  # newest steps that predict the cost of the next one


@dataclass
class Spending:
    """`spent` is the part of the `budget` that the profile, a warm start and the observed steps
    took, and `before` the part before the first step. `costs` are the costs of the newest steps per
    rollout or per prompt (the batch's unit); `size` is the size of a batch in this unit."""

    budget: CellBudget
    size: int
    spent: float = field(init=False)
    before: float = field(init=False)
    costs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spent = self.before = self.budget.profile

    @property
    def first_share(self) -> float:
        """The share that was spent before the first step."""
        return self.before / self.budget.amount

    def spend_before(self, cost: float) -> None:
        """Count the cost of a warm start, before the first step."""
        self.spent += cost
        self.before += cost

    def observe(self, spent: float, wanted: int) -> None:
        """Count a step: its cost `spent`, and its target amount `wanted` in the batch's unit."""
        self.spent += spent
        self.costs = [*self.costs, spent / max(wanted, 1)][-NUM_COSTS:]

    def predicted(self, num_ahead: int) -> float:
        """Return the predicted spending after `num_ahead` batches that are not observed yet."""
        mean = sum(self.costs) / max(len(self.costs), 1)
        return self.spent + num_ahead * mean * self.size

    def progress(self, num_ahead: int) -> float:
        """Return the share of the whole budget predicted to be spent after `num_ahead` batches."""
        return min(self.predicted(num_ahead) / self.budget.amount, 1.0)

    def done(self, num_ahead: int) -> float:
        """Return `progress` with `before` subtracted from both spending and budget."""
        trained = self.predicted(num_ahead) - self.before
        return min(trained / (self.budget.amount - self.before), 1.0)

    def is_over(self, num_ahead: int) -> bool:
        """Return whether the budget left after `num_ahead` batches is too small for a step of one
        unit, or of a whole batch if `num_ahead` is above 0."""
        least = max(self.costs, default=0.0) * (self.size if num_ahead else 1)
        left = self.budget.amount - self.predicted(num_ahead)
        return left <= 0.0 or left < least

    def most(self, num_ahead: int) -> int:
        """Return the limit of the next step in the batch's unit: `size` or, with no batches ahead,
        the amount that the budget left buys at the newest steps' highest cost, if that is less."""
        if num_ahead or not self.costs:
            return self.size
        return min(self.size, int((self.budget.amount - self.spent) / max(self.costs)))
