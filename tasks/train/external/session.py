"""The record of a training that another trainer runs: its rollouts, graded here, and its policies,
measured here, in the tables and accounts of this project's own training.

The executed FLOPs of another trainer are unknown, so that account is null in every table."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from tasks.common import stage
from tasks.common.accounting.ledger import ACCOUNTS, charged_flops, paper_training_flops
from tasks.common.accounting.spending import generation_cost, read_budget
from tasks.common.artifacts import CURVE, PLAN, PROMPTS, STEPS, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import digest, whole_folder
from tasks.common.processes import locks
from tasks.common.statistics import bootstrap_interval
from tasks.engines.devices import held, training_gpus
from tasks.engines.loading import load_engine
from tasks.grading.background import BackgroundGrader
from tasks.models.folder import policy_digest
from tasks.models.policy import load_tokenizer, read_policy
from tasks.models.prompts import encode_prompts
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import OF_MACHINE, write_measured
from tasks.train.data.columns import Ints
from tasks.train.data.plan import Plan, read_plan
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.learner.ranks import Ranks
from tasks.train.learner.update import UpdateStats, learning_rate
from tasks.train.loading import load_slots
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.rows import describe_step, rollout_rows
from tasks.train.loop.state import ROUNDING, State
from tasks.train.loop.trainer import VALIDATION_DRAWS
from tasks.train.sampling.collector import MIN_JUDGED, Collector, RunContext, validation_rollouts
from tasks.train.sampling.grading import Early
from tasks.train.settings import Sections, TrainSettings
from tasks.train.slots import Slots
from tasks.train.trainers.own import (
    check_validation,
    input_files,
    record_inputs,
    run_components,
    summarize,
)

logger = logging.getLogger(__name__)

UNKNOWN = "executed"  # the account that only this project's own training can state
WHOLE = ("steps", "curve", "rollouts")  # tables of a checkpoint
SAVED = "session"  # folder of the checkpoint
TABLES = {"steps": STEPS, "curve": CURVE, "rollouts": TRAIN_ROLLOUTS}


@dataclass
class Session:
    """The constant parts of the training, and its `state` and spent `budget` so far. `position` is
    the next visit of the plan; `num_dropped` counts visits that the trainer left out."""

    context: RunContext
    sections: Sections
    plan: Plan
    prompts: Prompts
    validation: Prompts
    tokenizer: PreTrainedTokenizerBase
    grader: BackgroundGrader
    slots: Slots
    budget: RunBudget | None
    state: State
    position: int = 0
    num_dropped: int = 0
    table: list[pl.DataFrame] = field(default_factory=list)

    @property
    def done(self) -> float | None:
        """The spent share of the budget; None without a budget."""
        return None if self.budget is None else self.budget.done(0)

    def next_visits(self) -> Ints:
        """Return the next visits of one phase and one group size; empty at the end."""
        budget = self.budget  # a whole batch must be left of it
        over = budget is not None and budget.predicted(1) > budget.cell.amount
        most = self.context.settings.max_steps
        over = over or (most is not None and self.state.num_steps >= most)
        first = None if over else self.plan.start(self.position, self.done)
        if first is None:
            return np.zeros(0, np.int64)
        visits = self.plan.rest_of_phase(first, len(self.plan))
        sizes = self.plan.group_sizes_V[visits]
        return visits[: int(np.argmax(np.append(sizes != sizes[0], True)))]

    def must_stop(self, last: int) -> bool:
        """Move to the visit after `last`. Return whether another visit than that is due."""
        self.position = last + 1
        following = self.next_visits()
        return not len(following) or int(following[0]) != self.position

    def grade(
        self, rows_Q: Ints, group_B: Ints, token_ids: list[list[int]], reasons: list[str]
    ) -> Rollouts:
        """Return the rollouts of a step, graded and with their advantages, group by group. `rows_Q`
        has the row of each group's prompt."""
        prompts = self.prompts.token_ids(rows_Q)
        versions = [[self.state.num_steps] * len(ids) for ids in token_ids]
        rollouts = make_rollouts(
            rows_Q,
            prompts,
            group_B,
            token_ids=token_ids,
            logprobs=[[0.0] * len(ids) for ids in token_ids],
            versions=versions,
            reason=reasons,
        )
        table = rollouts.table
        golds = self.prompts.table.select("verifier", "answer", "prompt")
        golds_B = golds[table["prompt_row"].to_numpy()].rows()
        early = Early(self.grader, self.tokenizer, golds_B, [[]] * len(table))
        rollouts = replace(rollouts, table=early.finish(table, np.arange(len(table))))
        kept_B = ~rollouts.is_error_B()
        graded = rollouts.where(kept_B)
        advantages_B = np.zeros(len(table))
        advantages_B[kept_B] = self.slots.advantage(graded)
        advantages_N = np.repeat(advantages_B, rollouts.completion_tokens_B())
        return rollouts.estimated(kept_B, advantages_N)

    def charge(self, rollouts: Rollouts) -> float:
        """Enter the rollouts of a step into the budget and the ledger, with one update on each.
        Return the learning rate of the step."""
        architecture = self.context.policy.architecture
        rows, kept = rollouts.rows(), rollouts.rows(rollouts.kept_B).num_tokens
        mixed = rollouts.rows(rollouts.has_advantage_B()).num_tokens
        generated = charged_flops(architecture, generated=rows.num_tokens)
        charged = charged_flops(architecture, updated=kept)
        flat = paper_training_flops(architecture, rows.num_tokens, has_reference=False)
        ledger = self.state.ledger
        same = dict.fromkeys(("charged", "charged_mixed", "charged_paper"), generated)
        ledger.add("generate", tokens=rows.num_tokens, rollouts=len(rows.group_B), **same)
        ledger.add(
            "update",
            tokens=kept,
            charged=charged,
            charged_mixed=charged_flops(architecture, updated=mixed),
            charged_paper=flat - generated,
        )
        done = ledger.rollouts["generate"] / max(self.plan.num_rollouts(), 1)
        trained = done
        if (budget := self.budget) is not None:
            account = budget.cell.account
            cost = generation_cost(account, architecture, rows)
            budget.add_step(cost + (charged if account == "charged" else 0.0), budget.size)
            budget.observe_step()
            done, trained = budget.share, budget.done(0)
        self.state.progress = done
        return learning_rate(self.context.settings, self.state.num_steps, trained)

    def add_step(self, rollouts: Rollouts, rate: float) -> dict[str, Any]:
        """Add a step's rows to the tables, and return its row of STEPS."""
        state, first = self.state, self.state.num_steps
        visit = min(self.position, len(self.plan) - 1)
        row = {
            **dict.fromkeys(STEPS.columns),
            "step": first,
            "pass": int(self.plan.passes_V[visit]),
            "phase": int(self.plan.phases_V[visit]),
            "updated": True,
            "num_updates": 1,
            "learning_rate": rate,
            "nonfinite": False,
            "tokens": int(state.ledger.tokens["generate"]),
            **self.totals(),
            **describe_step(rollouts, UpdateStats()),
        }
        state.steps.append(row)
        rows = rollout_rows(first, self.prompts.ids, rollouts)
        nothing = pl.lit(None, TRAIN_ROLLOUTS.columns["sampler_logprobs"])
        self.table.append(rows.with_columns(nothing.alias("sampler_logprobs")))
        state.num_steps += 1
        return row

    def totals(self) -> dict[str, float | None]:
        """Return the running totals of training in every account, for a row of STEPS."""
        trained = {name: self.state.trained(name) for name in ACCOUNTS if name != UNKNOWN}
        return {f"flops_{name}": trained.get(name) for name in ACCOUNTS}

    @property
    def is_due(self) -> bool:
        """Whether the policy is to be measured now."""
        return self.state.progress >= self.state.next_validation

    def complete(self, folder: Path) -> None:
        """Copy the files of the initial policy, all but the weights, to a policy that the trainer
        has saved: it may save other settings, or no tokenizer."""
        for path in self.context.policy.folder.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy(path, folder)

    def validate(self, folder: Path) -> dict[str, Any]:
        """Measure the policy in `folder` on the validation prompts with this project's engine, and
        return its point of the curve."""
        state, context, settings = self.state, self.context, self.context.settings.validation
        policy = replace(context.policy, folder=folder)
        measured = replace(context, policy=policy)
        unsampled = validation_rollouts(self.validation, settings.num_samples)
        with state.timed("validate"):
            engine = load_engine(self.sections.engine, policy)
            generate = self.slots.generate
            collector = Collector(measured, engine, generate, self.tokenizer, self.grader)
            rates, cost = collector.pass_rates(self.validation, unsampled)
        state.ledger.add("evaluate", **cost.as_account())
        low, high = bootstrap_interval(rates, VALIDATION_DRAWS, np.random.default_rng(0))
        num_shares = int(state.progress / settings.every_share + ROUNDING)
        state.next_validation = (num_shares + 1) * settings.every_share - ROUNDING
        point = {
            "step": state.num_steps,
            **{name: value for name, value in self.totals().items() if name in CURVE.columns},
            "rollouts": int(state.ledger.rollouts["generate"]),
            "accuracy": float(rates.mean()),
            "accuracy_low": low,
            "accuracy_high": high,
            "branch": None,
        }
        state.curve.append(point)
        return point

    def tables(self) -> dict[str, pl.DataFrame]:
        rollouts = pl.concat(self.table) if self.table else TRAIN_ROLLOUTS.frame([])
        steps, curve = STEPS.frame(self.state.steps), CURVE.frame(self.state.curve)
        return dict(zip(WHOLE, (steps, curve, rollouts), strict=True))

    def save(self, parts: Mapping[str, Path], checkpoints: Checkpoints) -> None:
        """Write a checkpoint: what the trainer has saved, by name, and this record."""
        with whole_folder(checkpoints.folder / SAVED) as new:
            for name, path in parts.items():
                (shutil.copytree if path.is_dir() else shutil.copy)(path, new / name)
            for name, table in self.tables().items():
                TABLES[name].write(new / f"{name}.parquet", table)
            numbers = {"position": self.position, "num_dropped": self.num_dropped}
            budget = None if self.budget is None else self.budget.numbers()
            write_checked(
                new / "session.json", {**numbers, "state": self.state.numbers(), "budget": budget}
            )

    def restore(self, folder: Path) -> None:
        """Restore the record of a checkpoint."""
        numbers = read_checked(folder / "session.json")
        tables = {name: TABLES[name].read(folder / f"{name}.parquet") for name in WHOLE}
        self.position, self.num_dropped = numbers["position"], numbers["num_dropped"]
        self.state.restore(numbers["state"], tables["steps"].to_dicts(), tables["curve"].to_dicts())
        self.table = [tables["rollouts"]]
        if self.budget is not None:
            self.budget.restore(numbers["budget"])

    def write_results(self, policy: Path, checkpoints: Checkpoints, out: Path) -> None:
        """Write the outputs of the stage to `out`, with the policy in the folder `policy`."""
        with whole_folder(out / "policy") as new:
            shutil.copytree(policy, new, dirs_exist_ok=True)
        trained = policy_digest(out / "policy")
        write_checked(out / "policy.json", {"digest": trained})
        made = {
            key: value for key, value in checkpoints.components.items() if key not in OF_MACHINE
        }
        write_checked(out / "settings.json", {**made, "trained": trained})
        for name, table in self.tables().items():
            TABLES[name].write(out / f"{name}.parquet", table)
        flops: dict[str, Any] = {**self.state.ledger.as_dict(), UNKNOWN: None}
        flops["dropped_visits"] = self.num_dropped
        if (budget := self.budget) is not None:
            flops["budget"] = {**asdict(budget.cell), "spent": budget.spent}
        write_checked(out / "flops.json", flops)


@contextmanager
def training(
    run: stage.Stage, settings: TrainSettings
) -> Iterator[tuple[Session, Checkpoints, Path | None]]:
    """Yield the session of a cell, its checkpoints, and the last of them, from which the session
    goes on (None if there is none). The block trains and writes the results; afterwards the
    checkpoints are deleted."""
    recipe, seed = run.coordinates()
    sections, layout = run.sections(Sections), run.layout
    sections.check(settings)
    components = run_components(run, read_policy(layout), settings, sections)
    record_inputs(run, components)
    lock = layout.locks / f"train-{digest(components)}"
    graded = BackgroundGrader(sections.verify, judged=layout.judged, min_judged=MIN_JUDGED)
    with (
        locks.exclusive(lock, f"the checkpoints of {recipe}/{seed}"),
        held(training_gpus(sections.engine, 1)),
        graded as grader,
    ):
        checkpoints = Checkpoints(layout.checkpoints, components, sections.checkpoint.keep)
        session = session_of(run, settings, sections, grader)
        saved = checkpoints.folder / SAVED
        if saved.exists():
            session.restore(saved)
            logger.info("resumed after %d steps, not bit for bit", session.state.num_steps)
        lost = checkpoints.count_lost(session.state.work)
        yield session, checkpoints, saved if saved.exists() else None
        run.check_inputs()
        out = layout.train(recipe, seed)
        write_measured(session.state.seconds, lost, layout.measured(f"{recipe}-{seed}"), out)
        checkpoints.delete()
    run.tracker.model(f"{recipe}-{seed}", out / "policy", policy_digest(out / "policy"))
    summarize(session.state)


def session_of(
    run: stage.Stage, settings: TrainSettings, sections: Sections, grader: BackgroundGrader
) -> Session:
    """Return the session of a cell before its first step."""
    policy, files = read_policy(run.layout), input_files(run)
    recipe, seed = run.coordinates()
    tables = {name: PROMPTS.read(files[name]) for name in ("prompts", "validation")}
    check_validation(tables["validation"], files["validation"])
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    room = sections.sampling.max_tokens
    encode = partial(encode_prompts, tokenizer=tokenizer, policy=policy, room=room)
    prompts, validation = (Prompts(table, encode) for table in tables.values())
    plan = read_plan(PLAN.read(files["plan"]), prompts.ids, settings.batch)
    slots = load_slots(settings, plan, prompts.table)
    cell = read_budget(run.layout.plan(recipe, seed) / "budget.json")
    budget = None if cell is None else RunBudget(cell, settings.batch.size)
    return Session(
        RunContext(policy, settings, sections.sampling, Ranks(0, 1), seed),
        sections,
        plan,
        prompts,
        validation,
        tokenizer,
        grader,
        slots,
        budget,
        State(progress=0.0 if budget is None else budget.first_share),
    )
