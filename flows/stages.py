"""The stages of one flow run: what DVC says about each, and bringing one up to date."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows import commands, reasons, selection
from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.common.files import digest, digest_file, digest_folder

LABELS = {"Cached": "up to date", "Ran": "ran", "Restored": "restored from the run cache"}


class StageFailed(RuntimeError):
    """A stage's command, or dvc itself, ended with a non-zero status."""


@dataclass
class Stages:
    """What one look at the project found, and what has happened since."""

    needs: Mapping[str, set[str]]
    ordered: list[str]
    left_out: list[str]
    changed: dict[str, list[Any]]
    forced: set[str]
    outcomes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def examine(cls, recipes: list[str], seeds: list[str], force: list[str]) -> "Stages":
        """Ask DVC for the graph and, once, for everything that changed."""
        needs, changed = commands.graph(), commands.status()
        ordered, left_out = selection.select(needs, changed, recipes, seeds)
        forced = selection.choose(needs, force, "stage") if force else set()
        return cls(needs, ordered, left_out, changed, forced)

    @property
    def idle(self) -> bool:
        """Whether DVC found nothing to do for the chosen stages."""
        return not (set(self.changed) | self.forced) & set(self.ordered)

    def bring_up_to_date(self, stage: str) -> tuple[str, str]:
        """(Cached, Ran or Restored; the reason). Raises StageFailed when the stage did not
        succeed."""
        self.outcomes[stage] = "Failed"
        changes = self.look_again(stage)
        if changes or stage in self.forced:
            reason, started = self.reason(stage, changes), time.time()
            self.say(stage, "starts", reason)
            self.outcomes[stage] = self.repro(stage)
            note = Layout(commands.ROOT / "data").sampling_note(stage)
            if said := reasons.sampled(note, started):
                reason += f"; {said}"
        else:
            reason = "nothing changed"
            self.outcomes[stage] = "Cached"
        if not self.idle:
            self.say(stage, LABELS[self.outcomes[stage]])
        return self.outcomes[stage], reason

    def repro(self, stage: str) -> str:
        """Have DVC run the stage, or restore it: Ran or Restored."""
        code, started = commands.repro(stage, stage in self.forced)
        if code:
            raise StageFailed(failure(stage, code, started))
        return "Ran" if started else "Restored"

    def look_again(self, stage: str) -> list[Any]:
        """What changed for `stage`, asking DVC anew when something upstream was touched: it may
        have come out equal."""
        touched = {name for name, outcome in self.outcomes.items() if outcome != "Cached"}
        if selection.upstream(self.needs, self.needs[stage]) & touched:
            return commands.status(stage).get(stage, [])
        return self.changed.get(stage, [])

    def reason(self, stage: str, changes: list[Any]) -> str:
        lock = reasons.read_lock(commands.ROOT / "dvc.lock")
        phrases = reasons.explain(stage, changes, lock, commands.ROOT) if changes else []
        return "; ".join((["asked for by --force"] if stage in self.forced else []) + phrases)

    def say(self, stage: str, what: str, why: str = "") -> None:
        """One line on the terminal, now."""
        place = f"[{self.ordered.index(stage) + 1}/{len(self.ordered)}]"
        print(f"{place} {stage}: {what}" + (f" ({why})" if why else ""), flush=True)


def failure(stage: str, code: int, started: bool) -> str:
    what = "its command failed" if started else "dvc did not get as far as its command"
    return f"{what}; exit status {code}, more above. Alone: dvc repro -s {stage}"


def code_version(stage: str, root: Path = commands.ROOT) -> str:
    """A digest of the code that `stage` depends on, as dvc.yaml lists it."""
    entry = params.load(root / "dvc.yaml")["stages"][stage.partition("@")[0]]
    code = [root / dep for dep in entry["deps"] if dep.startswith("tasks/")]
    return digest(
        [digest_folder(path, ("**/*.py",)) if path.is_dir() else digest_file(path) for path in code]
    )
