"""What an environment must offer. One is a file here with `Settings`, where it has settings (a
frozen dataclass), and `Environment`, a subclass of the Protocol below, made with them.

An environment answers in text and is trusted code; what the policy wrote is data, and never
executed. The verifier grades the whole conversation afterwards, as it grades every completion.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from tasks.common import registry
from tasks.train import environments
from tasks.train.loading import make


class Episode(Protocol):
    """One rollout's conversation."""

    def reply(self, turn: str) -> str | None:
        """What the policy reads after it wrote `turn`; None when the conversation is over."""
        ...


class Environment(Protocol):
    """Starts episodes. It must give the same answers to the same turns: a resumed run repeats what
    a kill interrupted."""

    def start(self, prompt: str, answer: str) -> Episode:
        """An episode of a prompt with this gold answer."""
        ...


def load_environment(spec: Mapping[str, Any]) -> Environment:
    """The environment that `spec["name"]` names, with the other keys as its settings. Raises
    ParamsError for a name or a setting that there is not."""
    where = "train.generate.environment"
    module = registry.load(environments, spec.get("name"), f"{where}.name")
    values = {key: value for key, value in spec.items() if key != "name"}
    return cast(Environment, make(module, "Environment", values, where))
