"""TRL's GRPOTrainer in a process of its own, for `train.trainer: trl`.

The stage starts this file with the interpreter `train.external.python`, so it imports nothing of
this project. Messages are lines of JSON: a request on standard output, its answer on standard
input. The stage chooses prompts and grades; it also chooses the learning rate, when to save and
when to stop. Model and optimizer are the same objects for all chunks, each of which gets a trainer
of its own, because a GRPOTrainer has one group size."""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Stage:
    """The stage at the other end of the pipes."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the log

    def ask(self, about: str, **values: Any) -> Any:
        """Send a request, and return its answer."""
        print(json.dumps({"about": about, **values}), file=self.requests, flush=True)
        return json.loads(sys.stdin.readline())


class Session:
    """The model, its optimizer and the exchange with the stage, during all chunks."""

    __name__ = "winnow"

    def __init__(self, stage: Stage, job: dict[str, Any]) -> None:
        self.stage, self.job = stage, job
        self.tokenizer = AutoTokenizer.from_pretrained(job["policy"])
        self.model = AutoModelForCausalLM.from_pretrained(
            job["weights"], dtype=torch.float32, use_safetensors=True
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=tuple(job["betas"]), weight_decay=job["weight_decay"]
        )
        if job["optimizer"]:
            restore(self.optimizer, Path(job["optimizer"]))

    def __call__(self, completion_ids: Any, visit: list[int], **_: Any) -> list[float | None]:
        """Return the rewards of completions, as TRL's reward function; None for one that could not
        be graded."""
        answer = self.stage.ask("rewards", visits=visit, completions=completion_ids)
        for group in self.optimizer.param_groups:
            group["lr"] = answer["learning_rate"]
        rewards: list[float | None] = answer["rewards"]
        return rewards

    def train(self, chunk: dict[str, Any]) -> None:
        """Train on consecutive visits with one group size, until the stage stops it."""
        arguments = {"seed": self.job["seed"] + chunk["visits"][0], **self.job["arguments"]}
        rows = zip(chunk["prompts"], chunk["visits"], strict=True)
        trainer = GRPOTrainer(
            self.model,
            reward_funcs=self,
            args=GRPOConfig(
                **{**arguments, **chunk["arguments"]},
                shuffle_dataset=False,
                num_train_epochs=1,
                lr_scheduler_type="constant",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_list([{"prompt": p, "visit": v} for p, v in rows]),
            processing_class=self.tokenizer,
            callbacks=[Steps(self)],
            optimizers=(self.optimizer, LambdaLR(self.optimizer, lambda _: 1.0)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)

    def save(self, folder: str | None) -> bool:
        """Save policy and optimizer to a folder, if the stage named one. Return whether to stop."""
        if folder is None:
            return False
        self.model.save_pretrained(Path(folder) / "policy")
        save_file(tensors(self.optimizer), Path(folder) / "optimizer.safetensors")
        return bool(self.stage.ask("saved")["stop"])


class Steps(TrainerCallback):
    """Reports the end of every optimizer step to the stage."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        answer = self.session.stage.ask("step")
        should_stop = self.session.save(answer["save"])
        control.should_training_stop = answer["stop"] or should_stop


def tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state of AdamW by the number of the parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{n}.{name}": one[name] for n, one in state.items() for name in MOMENTS}


def restore(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load a state that `tensors` returned."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        number, moment = name.split(".")
        state.setdefault(int(number), {})[moment] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def main() -> None:
    """Train on chunks until the stage sends none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stage decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the stage (PR_SET_PDEATHSIG)
    stage = Stage()
    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(job["threads"])
    disable_progress_bars()
    session = Session(stage, job)
    while chunk := stage.ask("chunk"):
        if "save" in chunk:
            session.save(chunk["save"])
        else:
            session.train(chunk)


if __name__ == "__main__":
    main()
