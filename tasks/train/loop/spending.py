"""How far a run is in its budget: what its steps took, and what the next one may take.

While batches are in flight their cost is predicted from the newest steps, so control is asked for
a whole batch or not at all. Where none is, what is left sets the size of the next one."""

from dataclasses import dataclass, field

from tasks.common.spending import CellBudget

NUM_COSTS = 8  # of the newest steps, from which the cost of the next one is predicted


@dataclass
class Spending:
    """`spent` is what the profile and the observed steps took of the `budget`; `costs` are those of
    the newest steps, for one of the batch's unit; `size` is that of a batch."""

    budget: CellBudget
    size: int
    spent: float = field(init=False)
    costs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spent = self.budget.profile

    @property
    def first_share(self) -> float:
        """The share that the profile took."""
        return self.budget.profile / self.budget.amount

    def observe(self, spent: float, wanted: int) -> None:
        """Count a step that control was asked `wanted` of the batch's unit for."""
        self.spent += spent
        self.costs = [*self.costs, spent / max(wanted, 1)][-NUM_COSTS:]

    def predicted(self, num_ahead: int) -> float:
        """What will be spent with so many batches that are not observed yet."""
        mean = sum(self.costs) / max(len(self.costs), 1)
        return self.spent + num_ahead * mean * self.size

    def progress(self, num_ahead: int) -> float:
        """The share of the budget that will be spent with them."""
        return min(self.predicted(num_ahead) / self.budget.amount, 1.0)

    def done(self, num_ahead: int) -> float:
        """The share of what the profile left that will be spent with them."""
        budget = self.budget
        trained = self.predicted(num_ahead) - budget.profile
        return min(trained / (budget.amount - budget.profile), 1.0)

    def is_over(self, num_ahead: int) -> bool:
        """Whether the budget leaves nothing for another step beside the `num_ahead`; a whole one
        where there are some."""
        least = max(self.costs, default=0.0) * (self.size if num_ahead else 1)
        left = self.budget.amount - self.predicted(num_ahead)
        return left <= 0.0 or left < least

    def most(self, num_ahead: int) -> int:
        """How much of the batch's unit the next step may take, at the highest cost of the newest
        steps, so that the last steps come closer and closer to the amount."""
        if num_ahead or not self.costs:
            return self.size
        return min(self.size, int((self.budget.amount - self.spent) / max(self.costs)))
