"""`none`: strictly on-policy, nothing is stored."""

from tasks.train.slots import Replay


class Method(Replay):
    pass
