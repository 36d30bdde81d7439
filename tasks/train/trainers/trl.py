"""TRL's GRPOTrainer as the trainer of a cell, `train.trainer: trl`.

It samples and updates; this project chooses prompts, group sizes and learning rate by the plan,
grades, measures the policy, and counts the budget. Settings without an equivalent in TRL are
refused. A killed run resumes from its last checkpoint, but not bit for bit: TRL's random numbers
start again there."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tasks.common import stage
from tasks.common.progress import progress
from tasks.models.policy import stop_token_ids, torch_device
from tasks.models.prompts import messages_of
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.data.columns import Ints
from tasks.train.external.session import Session, training
from tasks.train.external.trl_arguments import arguments_of
from tasks.train.loop.loop import stop_requested
from tasks.train.settings import Sections, TrainSettings
from tasks.train.trainers.own import length_of

logger = logging.getLogger(__name__)

PROCESS = "tasks.train.external.trl_process"


def main(run: stage.Stage, settings: TrainSettings) -> None:
    """Train along the recipe's plan, from the last checkpoint if there is one, and write the
    results."""
    sections = run.sections(Sections)
    arguments = arguments_of(settings, sections.sampling)
    with training(run, settings) as (session, checkpoints, saved), ExitStack() as stack:
        job = job_of(session, arguments, checkpoints, saved)
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=checkpoints.folder)))
        stopping = stack.enter_context(stop_requested())
        length = length_of(session.budget, session.plan)
        bar = stack.enter_context(progress(length.amount, "train", length.unit))
        process = stack.enter_context(started(job, settings.external.python))
        Exchange(session, run.tracker, process, bar, checkpoints, scratch, stopping).run()
        out = run.layout.train(*run.coordinates())
        session.write_results(scratch / "policy", checkpoints, out)


class Exchange:
    """The conversation with TRL's process: it asks, and each method answers one kind of request."""

    def __init__(
        self,
        session: Session,
        tracker: Any,
        process: "subprocess.Popen[str]",
        bar: Any,
        checkpoints: Checkpoints,
        scratch: Path,
        stopping: Callable[[], bool],
    ) -> None:
        self.session, self.tracker, self.process, self.bar = session, tracker, process, bar
        self.checkpoints, self.scratch, self.stopping = checkpoints, scratch, stopping
        self.stop_ids = stop_token_ids(session.context.policy.folder, session.tokenizer)
        self.chunk: Ints = np.zeros(0, np.int64)
        self.since = self.ticked = time.monotonic()
        self.has_ended = self.was_stopped = False

    def run(self) -> None:
        """Answer until the training has ended. Raise StageError if TRL's process fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.session.is_due:
            self.measure(self.session.context.policy.folder)
        for line in self.process.stdout:
            request = json.loads(line)
            answer = getattr(self, f"on_{request.pop('about')}")(**request)
            self.process.stdin.write(json.dumps(answer) + "\n")
            self.process.stdin.flush()
        if self.process.wait() or not self.has_ended:
            raise stage.StageError(
                f"TRL's process ended with status {self.process.returncode} after step "
                f"{self.session.state.num_steps}; its message is above. The same command resumes "
                "from the last checkpoint"
            )

    def on_chunk(self) -> Any:
        """Return the next visits; at the end, request the policy, and then return nothing."""
        session = self.session
        if len(self.chunk) and not self.was_stopped:  # TRL leaves out an incomplete last batch
            session.num_dropped += int(self.chunk[-1]) + 1 - session.position
            session.position = int(self.chunk[-1]) + 1
        if self.has_ended:
            return None
        self.chunk = session.next_visits()
        if not len(self.chunk):
            self.has_ended = True
            return {"save": str(self.scratch)}
        rows = session.prompts.table[session.plan.prompt_rows_V[self.chunk]]
        columns = rows.select("prompt", "messages", "template").rows()
        turns = [messages_of(row, session.tokenizer) for row in columns]
        prompts = [row[0] if one is None else one for row, one in zip(columns, turns, strict=True)]
        size, batch = int(session.plan.group_sizes_V[self.chunk[0]]), session.plan.batch
        num = batch.size if batch.unit == "prompts" else max(round(batch.size / size), 1)
        self.was_stopped = False
        if len(self.chunk) < num:
            return self.on_chunk()
        each = session.context.settings.external.arguments.get("per_device_train_batch_size")
        return {
            "prompts": prompts,
            "visits": self.chunk.tolist(),
            "arguments": {
                "num_generations": size,
                "per_device_train_batch_size": each or num * size,
                "gradient_accumulation_steps": max(num * size // (each or num * size), 1),
            },
        }

    def on_rewards(self, visits: list[int], completions: list[list[int]]) -> Any:
        """Grade the completions of a step."""
        reasons = ["stop" if ids[-1] in self.stop_ids else "length" for ids in completions]
        self.visits = np.array(visits)
        begins_B = np.diff(self.visits, prepend=-1) != 0
        rows_Q = self.session.plan.prompt_rows_V[self.visits[begins_B]]
        group_B = np.cumsum(begins_B) - 1
        self.rollouts = self.session.grade(rows_Q, group_B, completions, reasons)
        self.rate = self.session.charge(self.rollouts)
        rewards = zip(self.rollouts.rewards_B.tolist(), self.rollouts.is_error_B(), strict=True)
        return {
            "rewards": [None if is_error else reward for reward, is_error in rewards],
            "learning_rate": self.rate,
        }

    def on_step(self) -> Any:
        """Record a step. Request the policy if it is to be measured or saved."""
        session, state = self.session, self.session.state
        row = session.add_step(self.rollouts, self.rate)
        now = time.monotonic()
        state.seconds["train"] += now - self.ticked
        self.ticked = now
        state.work |= {"seconds": state.seconds["train"], "tokens": row["tokens"]}
        self.checkpoints.note_work(state.work)
        self.tracker.metrics(row, row["step"], row["flops_charged"])
        spent = session.budget.spent if session.budget else state.ledger.rollouts["generate"]
        self.bar.update(spent - self.bar.n)
        self.was_stopped = stop = session.must_stop(int(self.visits[-1]))
        is_late = time.monotonic() - self.since >= session.sections.checkpoint.every_seconds
        is_wanted = session.is_due or is_late or self.stopping()
        return {"stop": stop, "save": str(self.scratch) if is_wanted else None}

    def on_saved(self) -> Any:
        """Measure the saved policy if it is due, and make it the checkpoint."""
        session = self.session
        session.complete(self.scratch / "policy")
        is_measured = session.state.curve[-1]["step"] == session.state.num_steps
        if (session.is_due or self.has_ended) and not is_measured:
            self.measure(self.scratch / "policy")
        session.save({p.name: p for p in self.scratch.iterdir()}, self.checkpoints)
        self.since = time.monotonic()
        if self.stopping() and not self.has_ended:
            raise KeyboardInterrupt(f"stopped after {session.state.latest_step()}")
        return {"stop": False}

    def measure(self, folder: Path) -> None:
        point = self.session.validate(folder)
        accuracy, step = point["accuracy"], point["step"]
        self.tracker.metrics({"validation_accuracy": accuracy}, step, point["flops_charged"])
        logger.info("step %d: validation accuracy %.3f", step, accuracy)
        self.ticked = time.monotonic()


@contextmanager
def started(job: dict[str, Any], python: str | None) -> Iterator["subprocess.Popen[str]"]:
    """Start TRL's process with its job, and kill it at the end."""
    spec = find_spec(PROCESS)
    assert spec is not None
    assert spec.origin is not None
    command = [python or sys.executable, "-I", spec.origin]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def job_of(
    session: Session, arguments: dict[str, Any], checkpoints: Checkpoints, saved: Path | None
) -> dict[str, Any]:
    """Return what TRL's process needs for the whole training."""
    settings, policy = session.context.settings, session.context.policy.folder
    sections = session.sections
    return {
        "policy": str(policy),
        "weights": str(saved / "policy" if saved else policy),
        "optimizer": str(saved / "optimizer.safetensors") if saved else None,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "threads": sections.engine.threads,
        "seed": session.context.seed,
        "arguments": {
            "output_dir": str(checkpoints.folder / "trl"),
            "use_cpu": torch_device(sections.engine.device).type == "cpu",
            **arguments,
        },
    }
