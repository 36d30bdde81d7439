"""The contract of environments. An environment is a file here with `Environment`, a subclass of the
Protocol below, and, if it has settings, `Settings`, a frozen dataclass that `Environment` gets.

An environment replies in text and is trusted code. The policy's text is data, and never executed.
The verifier grades the whole conversation afterwards, as it grades every completion.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from tasks.common import registry
from tasks.train import environments
from tasks.train.loading import make


class Episode(Protocol):
    """One rollout's conversation."""

    def reply(self, turn: str) -> str | None:
        """Return the text that the policy reads after it wrote `turn`; None when the conversation
        is over."""
        ...


class Environment(Protocol):
    """Starts episodes. The same turns must get the same replies, because a resumed run repeats the
    interrupted part."""

    def start(self, prompt: str, answer: str) -> Episode:
        """Return an episode for a prompt with this gold answer."""
        ...


def load_environment(spec: Mapping[str, Any]) -> Environment:
    """Return the environment that `spec["name"]` names, with the other keys as its settings. Raise
    ParamsError for an unknown name or setting."""
    where = "train.generate.environment"
    module = registry.load(environments, spec.get("name"), f"{where}.name")
    values = {key: value for key, value in spec.items() if key != "name"}
    return cast(Environment, make(module, "Environment", values, where))
