"""Weights of an engine that samples during updates, or while it replaces them."""

from tasks.common.params import ParamsError
from tasks.engines.engine import SwappingEngine
from tasks.train.loop.engine_weights import EngineWeights


class BusyEngineWeights(EngineWeights):
    """Weights of an engine that samples during updates, so its memory is never freed."""

    parts_beside = ("generate",)

    def free(self) -> None:
        pass


class SwappedWeights(BusyEngineWeights):
    """Weights that are replaced in the middle of completions (`train.in_flight_updates`)."""

    def send(self) -> None:
        self.engine.set_weights(self.learner.weights(), self.learner.version)

    def swap(self) -> None:
        """Load the policy's weights into the engine, which is sampling."""
        self.engine.swap_weights(self.learner.weights(), self.learner.version)
        self.note_loaded()

    def check_before_validation(self) -> None:
        """Probe the engine, which was not probed while it sampled."""
        self.probe()

    @property
    def engine(self) -> SwappingEngine:
        """The engine. Raise ParamsError if it cannot load weights while it samples."""
        engine = self.collector.engine
        if not isinstance(engine, SwappingEngine):
            raise ParamsError(
                f"train.in_flight_updates is true, but the engine {engine.name} cannot load "
                "weights while it samples: set engine.name to server, or in_flight_updates to false"
            )
        return engine
