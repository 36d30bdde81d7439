"""From a verifier's name to what runs: the file of that name in `verifiers/`, its settings, and its
version.

A verifier is one file with `verify(completion, answer) -> Verdict`. Settings are keyword-only
arguments of `verify`; a verifier that has some is given a name and its values in params.yaml
(`verify.verifiers`), one without goes by its file's name alone. What else the file may have:

- `stating(answer)`: a completion that states this gold and nothing else, by which golds are checked
  before any sampling; None where a gold cannot be stated (then it only must not be an `error`).
  Without it, the gold itself.
- `uses(settings)`: names of verifiers that this one calls; `verify` then takes them as `verifiers`,
  by name.
- `LIBRARIES`: packages on which its verdicts depend; their versions are part of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tasks.common.code import version_of as code_version
from tasks.common.files import digest
from tasks.common.params import ParamsError
from tasks.common.registry import bind
from tasks.common.registry import load as load_file
from tasks.grading import verifiers
from tasks.grading.verdict import Verdict

Configured = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verifier:
    """One loaded verifier. `check` judges a gold: `correct`, or what is wrong with it; `version`
    changes with the code, the settings, the libraries and the verifiers behind it."""

    verify: Callable[[str, str], Verdict]
    check: Callable[[str], Verdict]
    version: str


def load(name: str, configured: Configured, users: tuple[str, ...] = ()) -> Verifier:
    """The verifier `name`. Raises ParamsError for an unknown file or setting; `users` are those
    that called for it."""
    where = f"verify.verifiers.{name}"
    if name in users:
        raise ParamsError(f"{where} calls itself: {' -> '.join([*users, name])}")
    settings = {"method": name, **configured.get(name, {})}
    module = load_file(verifiers, settings.pop("method"), f"{where}.method")
    others = {}
    if hasattr(module, "uses"):
        others = {other: load(other, configured, (*users, name)) for other in module.uses(settings)}
        verify = bind(module.verify, {**settings, "verifiers": others}, where)
    else:
        verify = bind(module.verify, settings, where)
    version = version_of(
        module, settings, {other: loaded.version for other, loaded in others.items()}
    )
    return Verifier(verify, checker(module, verify, list(others.values())), version)


def checker(
    module: ModuleType, verify: Callable[[str, str], Verdict], others: list[Verifier]
) -> Callable[[str], Verdict]:
    """What checks a gold: all verifiers behind this one, or whether the gold, stated, is
    `correct`."""
    usable = Verdict("correct", "")

    def check(answer: str) -> Verdict:
        if others:
            verdicts = [other.check(answer) for other in others]
            return next((verdict for verdict in verdicts if verdict.outcome != "correct"), usable)
        stated = module.stating(answer) if hasattr(module, "stating") else answer
        verdict = verify(stated or "", answer)
        return usable if stated is None and verdict.outcome != "error" else verdict

    return check


def version_of(module: ModuleType, settings: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """A digest of the code (not of comments and layout), the settings, the libraries, and the
    verifiers it calls."""
    code = code_version(module.__name__, getattr(module, "LIBRARIES", ()))
    return digest([code, dict(settings), dict(others)])[:12]
