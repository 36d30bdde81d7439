"""The stages of one flow run: the changes that DVC finds, and bringing a stage up to date."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.pipeline import commands, lock, reasons, roots, selection
from flows.pipeline.roots import Root
from tasks.common import params
from tasks.common.code import installed_version
from tasks.common.files import REASONS, ArtifactError, digest_file, read_json

logger = logging.getLogger(__name__)

CODE = "code"  # the stage that digests the code: all others depend on its outputs
ALWAYS = "always changed"  # dvc's message about that stage in a user's own project
NO_ROOM = re.compile(rf"^ERROR: .*\[Errno ({'|'.join(map(str, REASONS))})\]")  # dvc's own message
PAGE_SECONDS = 300.0
PAGE_SHARE = 0.05  # largest share of the time for the page of an unfinished report
LABELS = {"Cached": "up to date", "Ran": "ran", "Restored": "restored from the run cache"}


class StageFailed(RuntimeError):
    """Raised if a stage's command, or dvc itself, exits with a non-zero status."""


@dataclass
class Stages:
    """The stages of a data root as DVC found them, and their outcomes since. Stages are named as in
    the root's own pipeline."""

    dvc: commands.Dvc
    root: Root
    needs: Mapping[str, set[str]]
    ordered: list[str]
    left_out: list[str]
    changed: dict[str, list[Any]]
    forced: set[str]
    outcomes: dict[str, str] = field(default_factory=dict)
    code_reason: str = ""
    page_due: float = 0.0  # when the report's page may be written again; monotonic seconds

    @classmethod
    def examine(cls, dvc: commands.Dvc, root: Root, request: Any) -> "Stages":
        """Read the graph from DVC, update the code digests if the code changed, and then read all
        changes from DVC, once."""
        needs = roots.own_needs(root, dvc.graph())
        forced = forced_of(needs, request.force)
        code_reason = digest_code(dvc, root, CODE in forced)
        changed, forced = changes_of(dvc, root, root.pipeline), forced - {CODE}
        limits = request.recipes, request.seeds, forced, request.until
        ordered, left_out = selection.select(needs, changed, *limits)
        stages = cls(dvc, root, needs, ordered, left_out, changed, forced)
        if code_reason:
            stages.code_reason = code_reason
            stages.print_line(CODE, LABELS["Ran"], code_reason)
        return stages

    @property
    def stale(self) -> set[str]:
        """Return the chosen stages that are forced or have changes according to DVC."""
        return (set(self.changed) | self.forced) & set(self.ordered)

    @property
    def idle(self) -> bool:
        return not self.stale

    def bring_up_to_date(self, stage: str, dvc: commands.Dvc) -> tuple[str, str]:
        """Run a stage with `dvc` if it is stale. Return Cached, Ran or Restored, and the reason.
        Raise StageFailed if it fails."""
        if stage == CODE and self.code_reason:
            self.outcomes[stage] = "Ran"
            return "Ran", self.code_reason
        self.outcomes[stage] = "Failed"
        changes = self.changes_after_upstream(stage, dvc)
        if changes or stage in self.forced:
            self.check_left_out(stage, dvc)
            reason, started = self.reason(stage, changes), time.time()
            self.print_line(stage, "starts", reason)
            self.outcomes[stage] = self.repro(stage, dvc)
            note = self.root.layout.sampling_note(stage)
            if said := reasons.sampled(note, started):
                reason += f"; {said}"
        else:
            reason = "nothing changed"
            self.outcomes[stage] = "Cached"
        if not self.idle:
            self.print_line(stage, LABELS[self.outcomes[stage]])
        return self.outcomes[stage], reason

    def repro(self, stage: str, dvc: commands.Dvc) -> str:
        """Run the stage. Return Ran, or Restored (from the run cache), or raise StageFailed."""
        address = self.root.address(stage)
        self.keep_lock()
        code, started = dvc.repro(address, stage in self.forced)
        if code:
            raise StageFailed(failure(address, code, started, dvc.output.lines.tail))
        self.keep_lock()
        return "Ran" if started else "Restored"

    def keep_lock(self) -> None:
        with commands.whole_lock():
            lock.keep(self.root.lock, self.root.lock_copy)

    def changes_after_upstream(self, stage: str, dvc: commands.Dvc) -> list[Any]:
        """Return the changes of `stage`. If an upstream stage ran, request a new status from DVC,
        because the new outputs may equal the old ones."""
        outcomes = self.outcomes.copy()  # other threads add outcomes
        ran = {name for name, outcome in outcomes.items() if outcome != "Cached"} - {CODE}
        if selection.upstream(self.needs, self.needs[stage]) & ran:
            return changes_of(dvc, self.root, self.root.address(stage)).get(stage, [])
        return self.changed.get(stage, [])

    def check_left_out(self, stage: str, dvc: commands.Dvc) -> None:
        """Raise StageFailed if forced stages have changed the inputs of cells that `stage` needs
        and that are left out."""
        beside = self.needs[stage] & set(self.left_out) if self.forced else set[str]()
        if beside and (late := self.behind(beside, dvc)):
            raise StageFailed(f"out of date and left out: {', '.join(late)}; run all recipes")

    def behind(self, stages: set[str], dvc: commands.Dvc) -> list[str]:
        """Return the stages that are out of date now, among `stages` and all upstream of them."""
        changed = changes_of(dvc, self.root, self.root.pipeline)
        return sorted(selection.upstream(self.needs, stages) & set(changed))

    def reason(self, stage: str, changes: list[Any]) -> str:
        phrases = explain(self.root, stage, changes) if changes else []
        return "; ".join((["requested by --force"] if stage in self.forced else []) + phrases)

    def write_page(self) -> None:
        """Write the report's page of the cells that have ended, unless that takes more than
        PAGE_SHARE of the time. If it fails, the run goes on without it."""
        stale, started = set(self.changed) | self.forced, time.monotonic()
        needed = {stage: selection.upstream(self.needs, [stage]) for stage in self.needs}
        waiting = {
            stage
            for stage in self.needs
            if self.outcomes.get(stage, "Failed") not in LABELS
            and (stage in self.outcomes or needed[stage] & stale)
        }
        cells = [stage for stage in self.needs if stage.startswith("evaluate@")]
        if not waiting & {*cells} or waiting & {"profile", "baseline"} or started < self.page_due:
            return
        places = ["--params", str(self.root.layout.code_params), "--data", self.root.folder]
        command = [sys.executable, "-m", "tasks.report", *places, "--cells"]
        ended = [params.coordinates(stage) for stage in cells if stage not in waiting]
        command += [f"{recipe}/{seed}" for _, recipe, seed in ended]
        try:
            done = subprocess.run(
                command,
                cwd=commands.ROOT,
                env=commands.environment(),
                capture_output=True,
                timeout=PAGE_SECONDS,
            )
            why = done.stderr.decode(errors="replace")[-500:] if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        self.page_due = time.monotonic() + (time.monotonic() - started) / PAGE_SHARE
        if why:
            logger.warning("the report's page was not written: %s", why)

    def print_line(self, stage: str, what: str, why: str = "") -> None:
        place = f"[{self.ordered.index(stage) + 1}/{len(self.ordered)}]"
        said = f"{place} {self.root.titled(stage)}: {what}" + (f" ({why})" if why else "")
        print(f"{said}\n", end="", flush=True)  # in one piece, since several threads print


def forced_of(needs: Mapping[str, set[str]], force: list[str]) -> set[str]:
    """Return the stages that run although nothing changed. Raise SelectionError for an unknown
    name."""
    return selection.choose(needs, force, "stage") if force else set()


def changes_of(dvc: commands.Dvc, root: Root, target: str) -> dict[str, list[Any]]:
    """Return the changes that dvc finds for a target in the root, keyed by stage name."""
    changed = dvc.status(target)
    kept = {
        name: [one for one in changed[address] if one != ALWAYS]
        for address, name in root.own(changed).items()
    }
    return {name: changes for name, changes in kept.items() if changes}


def digest_code(dvc: commands.Dvc, root: Root, forced: bool) -> str:
    """Run the stage `code` if stale, forced or always changed. Return the reason, if there is one.

    DVC detects a changed file or requirement. It cannot detect a library that was installed without
    a change of the requirements: the digest files contain the versions, so they are compared
    here."""
    address = root.address(CODE)
    entries = dvc.status(address).get(address, [])
    changes = [one for one in entries if one != ALWAYS]
    moved = [] if changes else moved_versions(root)
    reasons_to_run = [
        *(["requested by --force"] if forced else []),
        *(explain(root, CODE, changes) if changes else []),
        *moved,
    ]
    if not reasons_to_run and ALWAYS not in entries:
        return ""
    options = ["--single-item", *(["--force"] if forced or moved else [])]
    answer = dvc.ask("--wait-for-lock", "repro", *options, address)
    if answer["code"]:
        lines = [*str(answer["output"]).splitlines(), *dvc.output.lines.tail]
        raise commands.CommandError(failure(address, answer["code"], True, lines))
    return "; ".join(reasons_to_run)


def moved_versions(root: Root) -> list[str]:
    """Return `torch 2.13.0 -> 2.14.0` for every library whose installed version differs from the
    version in the digest files."""
    recorded: dict[str, str | None] = {}
    for path in root.layout.code_folder.rglob("*.json"):
        try:
            recorded |= read_json(path)["versions"]
        except (ArtifactError, KeyError):
            continue
    found = {name: installed_version(name) for name in sorted(recorded)}
    return [
        f"{name} {recorded[name]} -> {version}"
        for name, version in found.items()
        if version and version != recorded[name]
    ]


def explain(root: Root, stage: str, changes: list[Any]) -> list[str]:
    """Return why a stage of the root is out of date, a phrase per reason."""
    with commands.whole_lock():
        entries = lock.read(root.lock)
    return reasons.explain(stage, changes, entries, commands.ROOT, root.folder)


def failure(stage: str, code: int, started: bool, lines: Iterable[str]) -> str:
    """Return a message about a failed stage: why, how to resume, and `lines`, its last output."""
    said = list(lines)
    what = "its command failed" if started else "dvc failed before its command ran"
    if remedies := commands.lock_remedies("\n".join(said)):
        what = f"dvc failed before its command ran; {remedies[0]}"
    elif started and any(NO_ROOM.search(line) for line in said):
        what = (
            "its command succeeded, but dvc could not store its outputs: check that the disk of "
            "dvc's cache (`dvc cache dir`) has room and is writable"
        )
    last = "\n".join(said) or "(no output)"
    folder, _, name = stage.rpartition(":")
    command = "winnow run" + f" --data {folder.removesuffix('/dvc.yaml')}" * bool(folder)
    return (
        f"{what}; exit status {code}. To resume: `{command}`; up to this stage: "
        f"`{command} --until {name}`\n\nIts last lines:\n{last}"
    )


def code_version(root: Root, stage: str) -> str | None:
    """Return the digest of `stage`'s file of code digests; None if there is no such file."""
    name, recipe, _ = params.coordinates(stage)
    path = root.layout.code(name, recipe)
    return digest_file(path) if path.exists() else None
