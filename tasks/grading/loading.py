"""Load a verifier by its name: the file of that name in `verifiers/`, its settings, and its
version.

A verifier is one file with `verify(completion, answer) -> Verdict`. Settings are keyword-only
arguments of `verify`; a verifier with settings gets a name and values in params.yaml
(`verify.verifiers`), one without is known by the name of its file. The file may also have:

- `canonical_completion(answer)`: a completion that gives exactly this gold, with which golds are
  checked before any sampling; None where a gold cannot be given in one completion (then it only
  must not be an `error`). Without the function it is the gold itself.
- `uses(settings)`: names of verifiers that this one calls; `verify` then takes them as `verifiers`,
  by name.
- `ALONE = True`: no other verifier may call it.
- `ready(settings)`: fills caches before the processes that grade are forked, and raises ParamsError
  where the verifier cannot work on this machine; called when it is loaded.
- `EXAMPLE`: settings as a block of params.yaml, which the error shows where they are missing.
- `LIBRARIES`: packages on which its verdicts depend; their versions are part of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import indent
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
    """One loaded verifier. `check` judges a gold: `correct`, or what is wrong with it. `version`
    changes with the code, the settings, the libraries and the verifiers that it uses."""

    verify: Callable[[str, str], Verdict]
    check: Callable[[str], Verdict]
    version: str


def load(name: str, configured: Configured, users: tuple[str, ...] = ()) -> Verifier:
    """Return the verifier `name`. Raises ParamsError for an unknown file or setting. `users` are
    the verifiers that use it, outermost first."""
    where = f"verify.verifiers.{name}"
    if name in users:
        raise ParamsError(f"{where} uses itself: {' -> '.join([*users, name])}")
    settings = {"method": name, **configured.get(name, {})}
    module = load_file(verifiers, settings.pop("method"), f"{where}.method")
    if name not in configured and hasattr(module, "EXAMPLE"):
        raise ParamsError(
            f"the verifier {name} needs settings. Paste this into params.yaml, and change it as "
            f"needed:\nverify:\n  verifiers:\n{indent(module.EXAMPLE.strip(), ' ' * 4)}"
        )
    if users and getattr(module, "ALONE", False):
        raise ParamsError(f"{where} cannot be part of {users[-1]}: name it in the source")
    others = {}
    if hasattr(module, "uses"):
        others = {other: load(other, configured, (*users, name)) for other in module.uses(settings)}
        verify = bind(module.verify, {**settings, "verifiers": others}, where)
    else:
        verify = bind(module.verify, settings, where)
    if hasattr(module, "ready"):
        module.ready(settings)
    version = version_of(
        module, settings, {other: loaded.version for other, loaded in others.items()}
    )
    return Verifier(verify, checker(module, verify, list(others.values())), version)


def checker(
    module: ModuleType, verify: Callable[[str, str], Verdict], others: list[Verifier]
) -> Callable[[str], Verdict]:
    """Return the check of a gold: by every verifier that this one uses, or whether the canonical
    completion of the gold is `correct`."""
    usable = Verdict("correct", "")

    def check(answer: str) -> Verdict:
        if others:
            verdicts = [other.check(answer) for other in others]
            return next((verdict for verdict in verdicts if verdict.outcome != "correct"), usable)
        completion = answer
        if hasattr(module, "canonical_completion"):
            completion = module.canonical_completion(answer)
        verdict = verify(completion or "", answer)
        return usable if completion is None and verdict.outcome != "error" else verdict

    return check


def version_of(module: ModuleType, settings: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """A digest of the code (not of comments and layout), the settings, the libraries, and the
    verifiers it calls."""
    code = code_version(module.__name__, getattr(module, "LIBRARIES", ()))
    return digest([code, dict(settings), dict(others)])[:12]
