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
- `LIBRARIES`: packages on which its verdicts depend; their versions are part of its own.
- `ANSWERS = True`: it looks for an answer. It then gets only what follows the last `</think>`,
  unless the setting `after_think` is false.
- `REFUSES_COPIES = True`: its answers are formulas. An answer that copies a formula of the prompt
  is then `wrong` (see `copying`).

A verifier that calls others passes the prompt on: `verify(completion, answer, prompt)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import indent
from types import ModuleType
from typing import Any

from tasks.common.code import version_of as code_version
from tasks.common.files import digest
from tasks.common.params import ParamsError, convert
from tasks.common.registry import bind
from tasks.common.registry import load as load_file
from tasks.grading import copying, verifiers
from tasks.grading.answers import after_think
from tasks.grading.golds import read_gold
from tasks.grading.verdict import Verdict

Configured = Mapping[str, Mapping[str, Any]]
Verify = Callable[..., Verdict]  # of a completion, a gold and, where it is known, a prompt


@dataclass(frozen=True)
class Verifier:
    """One loaded verifier. `verify` judges a completion by its gold and, where it is known, its
    prompt. `check` judges a gold: `correct`, or what is wrong with it. `copy` returns the formula
    of a prompt that equals its gold, or None: an answer that copies it is `wrong`. `version`
    changes with the code, the settings, the libraries and the verifiers that it uses."""

    verify: Verify
    check: Callable[[str], Verdict]
    copy: Callable[[str, str], str | None]
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
    every = dict(settings)
    after = getattr(module, "ANSWERS", False) and convert(
        settings.pop("after_think", True), bool, f"{where}.after_think"
    )
    others = {}
    if hasattr(module, "uses"):
        others = {other: load(other, configured, (*users, name)) for other in module.uses(settings)}
        settings["verifiers"] = others
    verify = bind(module.verify, settings, where)
    if hasattr(module, "ready"):
        module.ready(settings)
    version = version_of(module, every, {other: one.version for other, one in others.items()})
    check = checker(module, verify, list(others.values()))
    if others:  # the first decides what is correct
        return Verifier(verify, check, next(iter(others.values())).copy, version)
    if after:
        verify = after_thinking(verify)
    if getattr(module, "REFUSES_COPIES", False):
        return Verifier(without_copies(verify), check, copy_finder(verify), version)
    return Verifier(lambda text, answer, _="": verify(text, answer), check, no_copy, version)


def after_thinking(verify: Verify) -> Verify:
    """Return a verifier that gets only what follows the reasoning."""
    return lambda completion, answer: verify(after_think(completion), answer)


def without_copies(verify: Verify) -> Verify:
    """Return a verifier that gets the prompt as well, and takes no copy of its formulas."""

    def judge(completion: str, answer: str, prompt: str = "") -> Verdict:
        verdict = verify(completion, answer)
        if prompt and verdict.outcome == "correct":
            formula = copying.copied(verdict.answer, read_gold(answer).answers, prompt)
            if formula is not None and verify(boxed(formula), answer).outcome == "correct":
                return Verdict("wrong", verdict.answer)
        return verdict

    return judge


def copy_finder(verify: Verify) -> Callable[[str, str], str | None]:
    """Return `Verifier.copy` for a verifier that takes copies."""

    def copy(answer: str, prompt: str) -> str | None:
        found = copying.candidates(read_gold(answer).answers, prompt)
        passing = (one for one in found if verify(boxed(one), answer).outcome == "correct")
        return next(passing, None)

    return copy


def no_copy(answer: str, prompt: str) -> None:
    """Return None: the answers of this verifier are no formulas."""


def boxed(formula: str) -> str:
    """Return a completion that gives this formula."""
    return rf"\boxed{{{formula}}}"


def checker(module: ModuleType, verify: Verify, others: list[Verifier]) -> Callable[[str], Verdict]:
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
    modules = [module.__name__, __name__]
    code = [code_version(name, getattr(module, "LIBRARIES", ())) for name in modules]
    return digest([code, dict(settings), dict(others)])[:12]
