"""`truncated`: do not train on completions that were cut at the token limit (over-long filtering,
arXiv 2503.14476).

They count in their group's mean and among the rollouts of the loss's divisor. Their tokens do not
count in it, as in TRL. Whatever the order, other methods of `train.shape` that change advantages
get only the other rollouts."""

from tasks.train.slots import Shape


class Method(Shape):
    drops_cut = True
