"""The noise of a gradient: how far the gradients of single groups are from their mean.

McCandlish et al., 2018, arXiv 1812.06162, appendix A."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientNoise:
    """The squared norms of a gradient, the mean over `num_groups` groups, and of the mean over a
    part of them. Groups without a gradient count as zero. For example
    GradientNoise(16, 8, 0.9, 1.4)."""

    num_groups: float
    num_in_part: float
    square: float
    part_square: float

    @property
    def signal(self) -> float:
        """An unbiased estimate of the squared norm of the expected gradient."""
        whole, part = self.num_groups, self.num_in_part
        return (whole * self.square - part * self.part_square) / (whole - part)

    @property
    def variance(self) -> float:
        """An unbiased estimate of the trace of the covariance of one group's gradient."""
        return (self.part_square - self.square) / (1.0 / self.num_in_part - 1.0 / self.num_groups)


def noise_of(num_groups: int, square: float, of_half: float) -> GradientNoise:
    """Return the noise of a gradient from its squared norm and that of the sum over every second
    group, from the first on; both are divided by the totals of all `num_groups`."""
    num_in_half = (num_groups + 1) // 2
    return GradientNoise(num_groups, num_in_half, square, of_half * (num_groups / num_in_half) ** 2)
