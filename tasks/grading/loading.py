"""Load a verifier by name: the file of that name in `verifiers/`, its settings, and its version.

A verifier is one file with `verify(completion, answer) -> Verdict`. Its settings are keyword-only
arguments of `verify`, or, if there are many, a dataclass `Settings` that `verify` receives as the
argument `settings`. A verifier with settings has a name and values in params.yaml
(`verify.verifiers`); a verifier without settings uses the name of its file. The file may also
define:

- `canonical_completion(answer)`: returns a completion with exactly this gold as its answer, to
  check golds before sampling, or None if no single completion can contain the gold; then the only
  check is that the gold is not an `error`. Set `canonical_completion = None` if that applies to all
  golds. Without the function, the gold itself is the completion.
- `texts(answer)`: returns the answers in a gold, if the verifier has its own form for several.
- `FORMS`: the keys of JSON golds (see `golds`) that it supports besides `answer`; default: all.
- `uses(settings)`: returns the names of verifiers that this verifier calls; `verify` then receives
  a mapping `verifiers` from these names to the loaded verifiers.
- `ALONE = True`: no other verifier may call it.
- `ready(settings)`: fills caches before the grading processes are forked, and raises ParamsError if
  the verifier cannot work on this machine; called when the verifier is loaded.
- `EXAMPLE`: settings as a block of params.yaml, shown in the error for missing settings.
- `LIBRARIES`: packages that affect the verdicts; their versions are part of the verifier's version.
- `ANSWERS = True`: the verifier extracts an answer, so it receives only the text after the last
  `</think>`, unless the setting `after_think` is false.
- `REFUSES_COPIES = True`: the answers are formulas, and an answer that copies a formula of the
  prompt is `wrong` (see `copying`).

A verifier that calls others passes the prompt on: `verify(completion, answer, prompt)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from textwrap import indent
from types import ModuleType
from typing import Any

from tasks.common.code import version_of as code_version
from tasks.common.files import digest
from tasks.common.params import ParamsError, convert, parse, unknown
from tasks.common.registry import bind, names
from tasks.common.registry import load as load_file
from tasks.grading import verifiers
from tasks.grading.answers import copying
from tasks.grading.answers.golds import form_of, read_gold
from tasks.grading.answers.marked import after_think
from tasks.grading.verdict import Verdict

Configured = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Verifier:
    """One loaded verifier. `function` is its `verify` with the settings bound; `others` are the
    verifiers that it calls. `version` changes with the code, the settings, the libraries and the
    called verifiers."""

    module: ModuleType
    function: Callable[..., Verdict]
    others: tuple["Verifier", ...]
    after_think: bool
    version: str

    def verify(self, completion: str, answer: str, prompt: str = "") -> Verdict:
        """Return the verdict on a completion, given its gold and, if known, its prompt. With
        REFUSES_COPIES, an answer that copies a formula of the prompt, or is not in the form that it
        names, is `wrong`."""
        if self.others:
            return self.function(completion, answer, prompt)
        verdict = self.judge(completion, answer)
        refuses_copies = getattr(self.module, "REFUSES_COPIES", False)
        if prompt and verdict.outcome == "correct" and refuses_copies:
            golds = read_gold(answer).answers
            formula = copying.copied(verdict.answer, golds, prompt)
            # a formula that is not correct as an answer cannot be the reason for the verdict
            copy = formula and self.judge(rf"\boxed{{{formula}}}", answer).outcome == "correct"
            if copy or not copying.has_form(verdict.answer, golds, prompt):
                return Verdict("wrong", verdict.answer)
        return verdict

    def judge(self, completion: str, answer: str) -> Verdict:
        """Return the verdict on a completion; if `after_think`, on its text after `</think>`, and
        `unparsed` if a `<think>` without a tagged answer is not closed."""
        text = after_think(completion) if self.after_think else completion
        if self.after_think and "</answer>" not in text and "<think>" in text:
            return Verdict("unparsed", "")
        return self.function(text, answer)

    def check(self, answer: str, given: str = "") -> Verdict:
        """Return the verdict on a gold's canonical completion (without one, `correct` unless the
        gold is an `error`) or, if this verifier calls others, their first verdict other than
        `correct`, if any. With a second gold `given`, grade its completion, by only the first."""
        usable = Verdict("correct", "")
        if self.others:
            verdicts = (other.check(answer, given) for other in self.others[: 1 if given else None])
            return next((verdict for verdict in verdicts if verdict.outcome != "correct"), usable)
        form = form_of(answer) or {}
        if keys := form.keys() - {"answer", *getattr(self.module, "FORMS", form)}:
            return Verdict("error", f"the verifier does not support golds with `{min(keys)}`")
        give = getattr(self.module, "canonical_completion", lambda gold: gold)
        completion = give and give(given or answer)
        verdict = self.function(completion or "", answer)
        is_usable = completion is None and not given and verdict.outcome != "error"
        return usable if is_usable else verdict

    def same(self, gold: str, other: str) -> bool:
        """Return whether two golds are equivalent: forms and tolerances are equal, every answer of
        `gold` is correct against one of `other`, and none of `other` is left without a match."""
        texts = getattr(self.module, "texts", lambda answer: read_gold(answer).answers)
        forms = [replace(read_gold(answer), answers=()) for answer in (gold, other)]
        same = [[self.check(b, a).outcome == "correct" for b in texts(other)] for a in texts(gold)]
        return forms[0] == forms[1] and all(map(any, [*same, *zip(*same, strict=True)]))


def load(name: str, configured: Configured, users: tuple[str, ...] = ()) -> Verifier:
    """Return the verifier `name`. Raise ParamsError for an unknown file or setting. `users` are the
    verifiers that call it, outermost first."""
    where = f"verify.verifiers.{name}"
    if name in users:
        raise ParamsError(f"{where} uses itself: {' -> '.join([*users, name])}")
    if name not in configured and name not in (files := names(verifiers)):
        known = sorted({*files, *configured})
        raise ParamsError(unknown(f"verifier {name!r} is unknown; choose from", name, known))
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
    function: Callable[..., Verdict]
    ready: Any = settings
    if hasattr(module, "Settings"):
        ready = parse(settings, module.Settings, where)
        function = partial(module.verify, settings=ready)
    else:
        function = bind(module.verify, settings, where)
    if hasattr(module, "ready"):
        module.ready(ready)
    code = [code_version(n, getattr(module, "LIBRARIES", ())) for n in (module.__name__, __name__)]
    version = digest([code, every, {other: one.version for other, one in others.items()}])[:12]
    return Verifier(module, function, tuple(others.values()), after, version)
