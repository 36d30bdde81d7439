"""Any program as the trainer of a cell, `train.trainer: command`.

The visits of the plan are exported in the format of a trainer, and the command trains on them:
once, or once for each run of groups of one size if the format has one size a file. Its arguments
may contain

    {policy}   the policy to begin with: the initial one, or that of the segment before
    {data}     the segment's file      {n}     the size of its groups (8 if each has its own)
    {out}      a folder for its files, which is still there if a killed run resumes
    {seed}     the cell's seed         {grader}   the address of the verifiers (`winnow grade`)

Afterwards its policy is read from the folder `checkpoint` in {out}, and the rollouts that it dumped
are graded here: they are its cost."""

import logging
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tasks.common import recipes, stage
from tasks.common.artifacts import PLAN
from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.params import ParamsError
from tasks.common.processes.guard import guarded
from tasks.models.folder import check_folder
from tasks.train.external import dumps, service
from tasks.train.external.export import USUAL_SIZE, Options, export
from tasks.train.external.imports import Known
from tasks.train.external.session import Session, training
from tasks.train.external.visits import Visits, differences, joined, prompts
from tasks.train.settings import TrainSettings

logger = logging.getLogger(__name__)

READ = ("train", "validation")  # splits of prompts that the stage reads


def main(run: stage.Stage, settings: TrainSettings) -> None:
    """Train along the recipe's plan, from the last finished segment if there is one, and write the
    results."""
    recipe, seed = run.coordinates()
    layout, external = run.layout, settings.external
    with training(run, settings) as (session, checkpoints, saved):
        folder = checkpoints.folder / "segments"
        if not (folder / "export").exists():
            visits, options = visits_of(run, session), Options(external.target, is_unordered=True)
            export(visits, options, run.params, layout, f"{recipe}/{seed}", folder / "export")
        policy = session.context.policy.folder if saved is None else saved / "policy"
        if not session.state.curve:
            session.validate(policy)
        segments = read_json(folder / "export" / "manifest.json")["segments"]
        with (
            service.opened(run.params, layout, READ) as grading,
            service.running(grading) as address,
        ):
            for number in range(session.position, len(segments)):
                values = {
                    "policy": policy,
                    "data": folder / "export" / segments[number]["file"],
                    "n": segments[number]["group_size"] or USUAL_SIZE,
                    "out": folder / f"{number:03d}",
                    "seed": seed,
                    "grader": address,
                }
                with session.state.timed("train"):
                    execute(external.command, values)
                policy = trained_in(values["out"] / external.checkpoint, session)
                read_back(session, values["out"])
                session.position = number + 1
                session.validate(policy)
                session.save({"policy": policy}, checkpoints)
        session.write_results(policy, checkpoints, layout.train(recipe, seed))


def visits_of(run: stage.Stage, session: Session) -> Visits:
    """Return the visits of the plan that the budget pays for. Raise ParamsError for a budget in
    another account than rollouts: a command cannot be stopped by its tokens."""
    recipe, seed = run.coordinates()
    layout, budget = run.layout, session.budget
    plan = layout.plan(recipe, seed) / "plan.parquet"
    table = PLAN.read(plan).drop("order")
    if budget is not None:
        if budget.cell.account != "rollouts":
            raise ParamsError(
                f"train.trainer is command, and the budget is in {budget.cell.account}: set "
                "experiment.budget.account to rollouts, or experiment.budget to null"
            )
        room = budget.cell.amount - budget.cell.profile
        table = table.filter(pl.col("group_size").cum_sum() <= room)
    if table.is_empty():
        raise ParamsError(
            "experiment.budget.amount, less the profile, is below the first group: raise it"
        )
    every = prompts(layout, has_rates=False)
    digests = {
        "policy": session.context.policy.digest,
        "prompts": digest_file(layout.prompts("train")),
        "plan": digest_file(plan),
    }
    train = recipes.recipe(run.params, recipe)["train"]
    visits = joined(table, every, f"{recipe}/{seed}")
    return Visits(visits, True, digests, differences(train))


def execute(command: list[str], values: dict[str, Any]) -> None:
    """Run the command with `values` in place of their names. Raise StageError if it fails."""
    values["out"].mkdir(parents=True, exist_ok=True)
    words = list(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    logger.info("running %s", " ".join(words))
    try:
        guard = guarded(words, grace=10.0)
        with subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True) as process:
            status = process.wait()
    except OSError as error:
        raise stage.StageError(f"train.external.command: {error}") from error
    if status:
        raise stage.StageError(
            f"train.external.command ended with status {status}: {' '.join(words)}. Its files are "
            f"in {values['out']}; the same command runs this segment again"
        )


def trained_in(folder: Path, session: Session) -> Path:
    """Return the folder of the trained policy, completed by the files of the initial one."""
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder} does not exist after train.external.command: write the policy to "
            "{out}/" + session.context.settings.external.checkpoint
        )
    session.complete(folder)
    check_folder(folder)
    return folder


def read_back(session: Session, out: Path) -> None:
    """Grade the rollouts of a segment, and enter its steps."""
    known = Known(session.prompts.table, session.tokenizer, session.context.policy)
    where = session.context.settings.external.rollouts
    assert where is not None  # `TrainSettings` requires it
    rollouts = dumps.read(where.format, out / where.folder)
    rows = {id_: row for row, id_ in enumerate(session.prompts.ids)}
    for _, of_step in groupby(rollouts, lambda one: one.step):
        some = list(of_step)
        ids = [known.match(one, is_plain=False) for one in some]
        firsts = list(dict.fromkeys(ids))
        groups = {id_: number for number, id_ in enumerate(firsts)}
        order = sorted(range(len(some)), key=lambda place: groups[ids[place]])
        tokens = session.tokenizer([some[n].completion for n in order], add_special_tokens=False)
        graded = session.grade(
            np.array([rows[one] for one in firsts]),
            np.array([groups[ids[n]] for n in order]),
            tokens["input_ids"],
            ["unknown"] * len(some),
        )
        session.add_step(graded, session.charge(graded))
