"""A stage that another machine has sent: the flow that a worker runs in its own checkout.

The checkout belongs to the worker. It is brought to the sender's commit, gets the sender's
params.yaml and dvc.lock for as long as the stage runs, fetches what the stage reads from DVC's
remote, and pushes there what it made. One stage at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import commands, lock, logs, records
from flows.roots import Root
from flows.stages import StageFailed, failure, moved_versions
from tasks.common import process
from tasks.common.files import write_json
from tasks.common.layout import Layout

logs.speak()  # after Prefect's import, which silences the root logger

LAYOUT = Layout(commands.ROOT / "data")
FLOW = "winnow-stage"
ARTIFACT = "winnow-lock-entry"
NOTE = LAYOUT.locks / "sent.json"
SENT = ("dvc.lock", "params.yaml")


class CheckoutError(commands.CommandError):
    """This checkout is not what the sender has; the message says why and what to do."""


@flow(name=FLOW, persist_result=False)
def run_stage(stage: str, commit: str, parameters: str, locked: str, force: bool) -> State:
    """Run a stage for its sender, whose commit, params.yaml and entries of dvc.lock these are.

    Args:
        stage: Its name, as DVC has it.
        commit: What the checkout must be at.
        parameters: The text of params.yaml.
        locked: The text of dvc.lock: the stage's entry and those of all that it needs.
        force: Whether it runs although nothing changed.
    """
    with (
        process.exclusive(LAYOUT.locks / "pipeline", "the pipeline"),
        checkout(commit, {"params.yaml": parameters, "dvc.lock": locked}),
        commands.Dvc() as dvc,
    ):
        outcome, entry = bring_up_to_date(stage, force, dvc)
    Artifact(key=ARTIFACT, type="text", data=entry, description=stage).create()
    return Completed(name=outcome, message=f"{stage} at {commit[:12]}")


def bring_up_to_date(stage: str, force: bool, dvc: commands.Dvc) -> tuple[str, str]:
    """(Ran, or Restored where nothing had to run; the stage's entry of dvc.lock). Raises
    StageFailed when it did not succeed."""
    needs = dvc.graph()
    if stage not in needs:
        raise CheckoutError(f"this checkout has no stage {stage}: its dvc.yaml is another")
    dvc.look("pull", "--force", *sorted(needs[stage]))
    if moved := moved_versions(Root()):
        raise CheckoutError(
            f"other versions are installed here than at the sender's: {', '.join(moved)} (the "
            "sender's first); install the same requirements"
        )
    dvc.watch = records.Watch(stage)
    code, started = dvc.repro(stage, force)
    dvc.watch(dvc.output)
    if code:
        raise StageFailed(failure(stage, code, started, dvc.output.lines.tail))
    dvc.look("push", stage)
    text = (commands.ROOT / "dvc.lock").read_text()
    return "Ran" if started else "Restored", lock.entries(text)[stage]


@contextmanager
def checkout(commit: str, files: dict[str, str]) -> Iterator[None]:
    """This checkout at the commit, with these files in place of its own. A run that was killed
    leaves a note, and the next one puts the files back first."""
    if NOTE.exists():
        restore()
    changed = commands.git("status", "--porcelain")
    if changed:
        raise CheckoutError(
            f"{commands.ROOT} is a worker's checkout and has to be as committed, and "
            f"{changed.splitlines()[0][3:]} is not: commit it, or take it away"
        )
    if commands.git("rev-parse", "HEAD") != commit:
        bring_to(commit)
    write_json(NOTE, sorted(files))
    try:
        for name, text in files.items():
            (commands.ROOT / name).write_text(text)
        yield
    finally:
        restore()


def bring_to(commit: str) -> None:
    """Check the commit out, fetched where it is not here yet."""
    if not is_here(commit):
        commands.git("fetch", "--quiet", "--all")
    if not is_here(commit):
        raise CheckoutError(
            f"commit {commit[:12]} is not in the repository that {commands.ROOT} fetches from: "
            "push it, and run again"
        )
    commands.git("checkout", "--quiet", "--detach", commit)


def is_here(commit: str) -> bool:
    try:
        commands.git("cat-file", "-e", f"{commit}^{{commit}}")
    except commands.CommandError:
        return False
    return True


def restore() -> None:
    """Put the files of the commit back."""
    commands.git("checkout", "--quiet", "--", *SENT)
    NOTE.unlink(missing_ok=True)
