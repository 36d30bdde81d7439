"""TRL's side of a comparison: GRPOTrainer over the same prompts in the same order, configured for
the same computation as Winnow.

On-policy GRPO with DAPO's loss (over the tokens of the step, clips 0.2 and 0.28), no KL, AdamW as
in params.yaml. Features that would slow TRL down, without a counterpart on the other side, are off:
logging, saving, evaluation, gradient checkpointing (TRL's default) and, unless the job is mixed,
bf16 (TRL's default; slower for small policies on a CPU). It generates with transformers. TRL
divides advantages by the sample standard deviation, Winnow by the population's (7 % smaller at 8
rollouts)."""

# ruff: noqa: E402 (what TRL looks at while it is imported is set before)
import json
import sys

sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL imports it where it is installed: memory it does not use

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

from tasks.grading.loading import load
from tests.bench.clock import Clock, Job, children_megabytes, peak_megabytes


def config(values: dict[str, Any], job: Job) -> GRPOConfig:
    """Return a GRPOConfig with the values of params.yaml, translated from Winnow's names."""
    train, sampling = values["train"], values["sampling"]
    return GRPOConfig(
        output_dir=str(job.root / "trl"),
        use_cpu=True,
        bf16=job.is_mixed,
        gradient_checkpointing=False,
        use_vllm=False,
        per_device_train_batch_size=train["batch"]["size"],
        gradient_accumulation_steps=1,
        num_generations=8,
        num_iterations=1,
        max_steps=job.steps,
        max_completion_length=sampling["max_tokens"],
        temperature=sampling["temperature"],
        learning_rate=job.learning_rate or train["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=train["betas"][0],
        adam_beta2=train["betas"][1],
        weight_decay=train["weight_decay"],
        max_grad_norm=train["max_grad_norm"],
        beta=0.0,
        loss_type="dapo",
        epsilon=train["loss"]["clip_low"],
        epsilon_high=train["loss"]["clip_high"],
        shuffle_dataset=False,
        seed=job.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Recorder(TrainerCallback):
    """The reward function (the prompts' verifier, in process) and the clock in one object, because
    both run at every step."""

    __name__ = "verifier"

    def __init__(
        self, out: Path, points: list[int], policy: Path, tokenizer: Any, verify: Any
    ) -> None:
        self.out, self.wanted, self.policy = out, points, policy
        self.tokenizer, self.verify = tokenizer, verify
        self.completion_tokens: list[int] = []
        self.generation = 0.0  # seconds
        self.points: list[dict[str, Any]] = []

    def __call__(self, prompts: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        """Return 1 for each completion that is correct and ended before the limit."""
        stop = self.tokenizer.eos_token_id
        texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        self.completion_tokens.append(sum(map(len, completion_ids)))
        return [
            float(ids[-1] == stop and self.verify(text, gold).outcome == "correct")
            for text, ids, gold in zip(texts, completion_ids, answer, strict=True)
        ]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.tick(self.generation)
        if state.global_step in self.wanted:
            with self.clock.paused():
                folder = self.out.with_name(f"{self.out.name}-{state.global_step}")
                kwargs["model"].save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
                shutil.copy(self.policy / "generation_config.json", folder)
            self.points.append(
                {"step": state.global_step, "seconds": self.clock.wall[-1], "folder": str(folder)}
            )


def measure(job: Job) -> dict[str, Any]:
    """Train, save the policy at the points as `job.out` with the number of the step, and return the
    measurements."""
    torch.set_num_threads(1)
    disable_progress_bars()
    values = yaml.safe_load((job.root / "params.yaml").read_text())
    rows = [json.loads(line) for line in (job.root / "order.jsonl").read_text().splitlines()]
    policy = job.root / "policy"
    model = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
    verify = load(rows[0]["verifier"], values["verify"]["verifiers"]).judge
    recorder = Recorder(job.out, job.points, policy, tokenizer, verify)
    trainer = GRPOTrainer(
        model,
        reward_funcs=recorder,
        args=config(values, job),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    generate = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        recorder.generation += time.perf_counter() - began
        return result

    trainer._generate_single_turn = timed
    trainer.train()
    return {
        "wall": recorder.clock.wall,
        "cpu": recorder.clock.cpu,
        "generation": recorder.clock.generation,
        "peak_mb": peak_megabytes(),
        "children_mb": children_megabytes(),
        "completion_tokens": recorder.completion_tokens,
        "points": recorder.points,
    }
