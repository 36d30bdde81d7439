"""python -m tasks.train --recipe R --seed S: train the initial policy along the recipe's plan."""

import argparse
import copy
import dataclasses
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import torch
from transformers import PreTrainedTokenizerBase

from tasks.common import params, process, stage
from tasks.common.artifacts import PLAN, PROMPTS, TRAIN_ROLLOUTS
from tasks.common.files import digest, digest_file
from tasks.engines.engine import EngineSettings, Sampling, engine_name, load_engine
from tasks.grading.grader import Grader, Verify
from tasks.models.packing import check_forward
from tasks.models.policy import (
    Policy,
    load_model,
    load_tokenizer,
    policy_digest,
    read_policy,
    torch_device,
)
from tasks.models.prompts import encode_prompts
from tasks.train.learner.ranks import Ranks, join_ranks, launch_ranks
from tasks.train.learner.update import enable_activation_checkpointing
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.collect import Collector
from tasks.train.loop.run import plan_arrays, train, write_results
from tasks.train.loop.trainer import Trainer, TrainingError
from tasks.train.rollouts import Prompts
from tasks.train.settings import CheckpointSettings, TrainSettings
from tasks.train.slots import load_slots

logger = logging.getLogger(__name__)


def main(run: stage.Stage) -> None:
    recipe, seed = run.coordinates()
    chosen = params.recipe(run.params, recipe)
    settings = params.parse(chosen["train"], TrainSettings, "train")
    sampling, engine_settings = (
        run.section("sampling", Sampling),
        run.section("engine", EngineSettings),
    )
    checkpoint_settings, layout = run.section("checkpoint", CheckpointSettings), run.layout
    verify = run.section("verify", Verify)
    check_settings(settings, sampling)
    torch.set_num_threads(engine_settings.threads)
    policy, plan_path = read_policy(layout), layout.recipe(recipe) / "plan.parquet"
    files = {
        "prompts": layout.prompts("train"),
        "validation": layout.prompts("validation"),
        "plan": plan_path,
    }
    digests = {name: digest_file(path) for name, path in files.items()}
    components = {
        "recipe": recipe,
        "seed": seed,
        "policy": policy.digest,
        **digests,
        "train": dataclasses.asdict(settings),
        "sampling": dataclasses.asdict(sampling),
        "engine": [engine_name(engine_settings), engine_settings.dtype],
        "verify": [verify.seconds, verify.memory_gb, verify.verifiers],
    }
    run.tracker.params(
        {"train": chosen["train"], "sampling": run.params["sampling"], "policy": policy.digest}
    )
    for name, path in files.items():
        run.tracker.dataset(name, path, digests[name], "train")

    replayed = run.options.from_rollouts
    ranks = join_ranks(torch_device(engine_settings.device))
    with ExitStack() as stack:
        if ranks.is_main:
            key = digest([components, str(replayed)])
            stack.enter_context(
                process.exclusive(
                    layout.locks / f"train-{key}", f"the checkpoints of {recipe}/{seed}"
                )
            )
            device = torch_device(engine_settings.device).type
            stack.enter_context(process.exclusive(layout.locks / f"device-{device}", "the device"))
        ranks.everyone(None)  # the others wait here until this run owns its checkpoints
        grader = stack.enter_context(Grader(verify))
        plan = PLAN.read(plan_path)
        trainer = build(run, policy, settings, sampling, engine_settings, grader, ranks, seed, plan)
        if replayed is not None:
            components["from_rollouts"] = digest_file(replayed)
            trainer.collector.recorded = TRAIN_ROLLOUTS.read(replayed)
        checkpoints = Checkpoints(layout.checkpoints, components, checkpoint_settings.keep)
        try:
            lost = train(
                trainer, checkpoints, checkpoint_settings, run.tracker.metrics, run.options.resume
            )
        except TrainingError as error:
            raise stage.StageError(str(error)) from error
        if not ranks.is_main:
            return
        out = layout.train(recipe, seed) if replayed is None else layout.replayed(recipe, seed)
        write_results(trainer, checkpoints, lost, out)
        checkpoints.delete()
    run.tracker.model(f"{recipe}-{seed}", out / "policy", policy_digest(out / "policy"))
    summarize(trainer)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What only a person at the keyboard asks for; a pipeline never needs it."""
    parser.add_argument(
        "--resume", type=Path, help="go on from this checkpoint folder; refused if it does not fit"
    )
    parser.add_argument(
        "--from-rollouts",
        type=Path,
        help="take the rollouts of a finished run's rollouts.parquet instead of drawing them",
    )


def build(
    run: stage.Stage,
    policy: Policy,
    settings: TrainSettings,
    sampling: Sampling,
    engine_settings: EngineSettings,
    grader: Grader,
    ranks: Ranks,
    seed: int,
    plan: pl.DataFrame,
) -> Trainer:
    """The trainer at step 0: the initial policy in float32 (the optimizer's precision), the engine,
    the prompts."""
    device = torch_device(engine_settings.device)
    model = load_model(
        policy.folder,
        dtype=torch.float32,
        device=device,
        trust_remote_code=policy.trust_remote_code,
    )
    check_forward(model, packed=settings.share_prompts)
    reference = copy.deepcopy(model).requires_grad_(False) if settings.kl_coefficient > 0 else None
    if settings.activation_checkpointing:
        enable_activation_checkpointing(model)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    prompts, validation = (
        read_prompts(PROMPTS.read(run.layout.prompts(split)), tokenizer, policy, sampling)
        for split in ("train", "validation")
    )
    slots, engine = load_slots(settings), load_engine(engine_settings, policy, model)
    generation = slots.start_generate(len(prompts.ids))
    collector = Collector(
        policy, engine, tokenizer, grader, sampling, slots.generate.generate, generation, ranks
    )
    arrays = plan_arrays(plan, prompts.ids)
    return Trainer(
        policy,
        model,
        reference,
        collector,
        prompts,
        validation,
        arrays,
        settings,
        slots,
        sampling,
        seed,
    )


def read_prompts(
    table: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, policy: Policy, sampling: Sampling
) -> Prompts:
    """A PROMPTS table ready for the trainer."""
    token_ids = encode_prompts(table, tokenizer, policy, sampling.max_tokens)
    return Prompts(
        table["prompt_id"].to_list(),
        token_ids,
        table["answer"].to_list(),
        table["verifier"].to_list(),
    )


def check_settings(settings: TrainSettings, sampling: Sampling) -> None:
    """Raise ParamsError for what would train wrongly.

    Training is on-policy only when it samples from the distribution whose log-probabilities it
    computes."""
    params.at_least(
        1,
        train__batch__size=settings.batch.size,
        train__max_nonfinite_steps=settings.max_nonfinite_steps,
    )
    if sampling.temperature <= 0 or sampling.top_p < 1.0 or sampling.top_k > 0:
        raise params.ParamsError(
            "training needs sampling.temperature > 0, top_p 1.0 and top_k 0 (no truncation); "
            f"sampling is {sampling}: "
            "with another distribution the ratio between trainer and sampler would be wrong"
        )


def summarize(trainer: Trainer) -> None:
    """What the run came to, in the log."""
    first, last = trainer.curve[0], trainer.curve[-1]
    mixed: Any = sum(row["num_mixed_groups"] for row in trainer.steps)
    groups: Any = sum(row["num_prompts"] for row in trainer.steps)
    logger.info(
        "%d steps, %d rollouts, %d of %d groups mixed; validation accuracy %.3f -> %.3f",
        trainer.num_steps,
        last["rollouts"],
        mixed,
        groups,
        first["accuracy"],
        last["accuracy"],
    )


def num_processes() -> int:
    """What params.yaml asks for, read before the stage begins; what is wrong with the file the
    stage will say."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    try:
        values = params.load(parser.parse_known_args()[0].params)
        return params.section(values, "engine", EngineSettings).num_processes
    except params.ParamsError:
        return 1


if __name__ == "__main__":
    launch_ranks("tasks.train", sys.argv[1:], num_processes())
    stage.run("train", main, recipe=True, seed=True, options=add_options)
