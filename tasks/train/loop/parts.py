"""Classes of a run's parts: synchronous, or ahead of the steps (`max_staleness`, which
`over_provision` requires)."""

from tasks.train.loop.ahead.queue import AheadQueue
from tasks.train.loop.ahead.sampler import AheadSampler
from tasks.train.loop.ahead.weights import BusyEngineWeights, SwappedWeights
from tasks.train.loop.engine_weights import EngineWeights
from tasks.train.loop.queue import GroupQueue
from tasks.train.loop.sampler import Sampler
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import TrainSettings


def queue_for(settings: TrainSettings) -> type[GroupQueue]:
    """Return the class of the queue of a run with these settings."""
    return AheadQueue if settings.max_staleness else GroupQueue


def weights_for(settings: TrainSettings) -> type[EngineWeights]:
    """Return the class that loads weights into the engine of a run with these settings."""
    if settings.in_flight_updates:
        return SwappedWeights
    return BusyEngineWeights if settings.num_ahead else EngineWeights


def sampler_of(trainer: Trainer) -> Sampler:
    """Return the sampler of a run."""
    return AheadSampler(trainer) if trainer.run.settings.max_staleness else Sampler(trainer)
