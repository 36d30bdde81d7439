"""This project's own training loop, `train.trainer: own`."""

import dataclasses
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common import recipes, stage
from tasks.common.accounting.spending import GENERATED, read_budget
from tasks.common.artifacts import PLAN, PROMPTS, SAMPLES
from tasks.common.files import ArtifactError, digest, digest_file, read_json
from tasks.common.params import ParamsError
from tasks.common.processes import locks
from tasks.engines.devices import held, training_gpus
from tasks.engines.engine import NoServerError
from tasks.engines.loading import check_shared_gpu, engine_name, load_engine
from tasks.engines.settings import EngineSettings
from tasks.grading.background import BackgroundGrader
from tasks.models.folder import policy_digest
from tasks.models.lora import add_adapters, load_adapted, quantize_base
from tasks.models.policy import Policy, load_model, load_tokenizer, read_policy, torch_device
from tasks.models.prompts import encode_prompts
from tasks.train.checkpoint import results
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import write_measured, write_results
from tasks.train.data.demonstrations import read_demonstrations
from tasks.train.data.plan import Plan, read_plan
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Features
from tasks.train.learner.learner import Learner, memory_of, sharding_of
from tasks.train.learner.ranks import (
    LOST_RANK,
    Ranks,
    announced_ranks,
    is_lost_rank,
    join_ranks,
    rank_failure,
)
from tasks.train.learner.reference import check_vocabulary
from tasks.train.loading import load_slots
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.loop import train
from tasks.train.loop.parts import queue_for, weights_for
from tasks.train.loop.reporter import Length
from tasks.train.loop.state import State, TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import MIN_JUDGED, Collector, RunContext
from tasks.train.settings import Sections, TrainSettings

logger = logging.getLogger(__name__)

MAX_ENCODED = 50_000  # prompts encoded at the start, which takes about ten seconds


def main(run: stage.Stage, settings: TrainSettings) -> None:
    """Train along the recipe's plan, from the newest checkpoint if there is one, and write the
    results."""
    recipe, seed = run.coordinates()
    sections, layout = run.sections(Sections), run.layout
    sections.check(settings)
    torch.set_num_threads(sections.engine.threads)
    policy, device = read_policy(layout), torch_device(sections.engine.device)
    components = run_components(run, policy, settings, sections)
    record_inputs(run, components)

    out, key = layout.train(recipe, seed), digest(components)
    kept = layout.unrecorded(recipe, seed)
    timeout = timedelta(seconds=sections.learner.collective_timeout_seconds)
    trainers: list[Trainer] = []
    with ExitStack() as stack:
        stack.enter_context(explaining_failures(announced_ranks(timeout), trainers))
        ranks = join_ranks(device, timeout, always=sections.learner.shard != "none")
        if ranks.is_main:
            lock = layout.locks / f"train-{key}"
            stack.enter_context(locks.exclusive(lock, f"the checkpoints of {recipe}/{seed}"))
            stack.enter_context(held(training_gpus(sections.engine, ranks.size)))
        ranks.wait_for_main()  # rank 0 waits until this run owns its checkpoints, and for GPUs
        may_restore = ranks.is_main and bool(run.dvc_locks)
        is_whole = may_restore and results.restore(out, kept, key, run.dvc_locks)
        if any(ranks.all_gather(is_whole)):
            return
        context = RunContext(policy, settings, sections.sampling, ranks, seed)
        grader = stack.enter_context(
            BackgroundGrader(sections.verify, judged=layout.judged, min_judged=MIN_JUDGED)
        )
        trainer, plan = build(run, context, sections, grader)
        trainers.append(trainer)
        checkpoints = Checkpoints(layout.checkpoints, components, sections.checkpoint.keep)
        log, length = run.tracker.metrics, length_of(trainer.budget, plan)
        lost = train(trainer, checkpoints, sections.checkpoint, log, length, run.options.resume)
        if ranks.is_main:
            log(trainer.collector.engine.metrics())
        write_results(trainer, checkpoints, out)
        if not ranks.is_main:
            return
        try:
            run.check_inputs()
        except ArtifactError:
            checkpoints.delete()  # the next run would resume from the last one
            raise
        seconds = {**trainer.state.seconds, "train": trainer.spent_seconds("validate", "branch")}
        write_measured(seconds, lost, layout.measured(f"{recipe}-{seed}"), out)
        if run.dvc_locks:
            results.keep(out, kept, key)
        checkpoints.delete()
    run.tracker.model(f"{recipe}-{seed}", out / "policy", policy_digest(out / "policy"))
    summarize(trainer.state)


class LostError(stage.StageError):
    """Raised if another rank of the training run, or every server, died or does not respond; the
    same command resumes the run."""

    status = LOST_RANK


@contextmanager
def explaining_failures(ranks: Ranks, trainers: Sequence[Trainer]) -> Iterator[None]:
    """Raise a StageError for a TrainingError, and a LostError if all servers or another rank are
    lost. The message about a rank names the reporting rank and, given `trainers`, the step."""
    try:
        yield
    except TrainingError as error:
        raise stage.StageError(str(error)) from error
    except NoServerError as error:
        raise LostError(
            f"{error}. Run the same command again: it resumes from the last checkpoint"
        ) from error
    except Exception as error:
        if ranks.size == 1 or not is_lost_rank(error):
            raise
        logger.debug("the error of torch", exc_info=True)
        when = "before the first step"
        if trainers:
            state = trainers[0].state
            when = f"step {state.num_steps}, {state.part or 'between two parts'}"
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise LostError(
            f"rank {ranks.rank} of {ranks.size} on {platform.node()}, {when}: "
            f"{rank_failure(error, ranks)}: {reason}. Run the same command again: it resumes from "
            "the last checkpoint"
        ) from error


def record_inputs(run: stage.Stage, components: Mapping[str, Any]) -> None:
    """Record the run's input files, and the components `train`, `sampling` and `policy`."""
    run.tracker.params({name: components[name] for name in ("train", "sampling", "policy")})
    for name, path in input_files(run).items():
        run.tracker.dataset(name, path, components[name], "train")


def input_files(run: stage.Stage) -> dict[str, Path]:
    """Return the tables that the stage reads, by name."""
    layout, coordinates = run.layout, run.coordinates()
    return {
        "prompts": layout.prompts("train"),
        "validation": layout.prompts("validation"),
        "plan": layout.plan(*coordinates) / "plan.parquet",
        "samples": layout.plan(*coordinates) / "samples.parquet",
    }


def run_components(
    run: stage.Stage, policy: Policy, settings: TrainSettings, sections: Sections
) -> dict[str, Any]:
    """Return everything that the result depends on; its digest is the key of the checkpoints."""
    recipe, seed = run.coordinates()
    budget = read_budget(run.layout.plan(recipe, seed) / "budget.json")
    code = run.layout.code("train", recipe)  # missing if the stage is run by hand
    return {
        "recipe": recipe,
        "seed": seed,
        "policy": policy.digest,
        **{name: digest_file(path) for name, path in input_files(run).items()},
        **run_parameters(settings, sections),
        "budget": None if budget is None else dataclasses.asdict(budget),
        **recipes.input_digests(dataclasses.asdict(settings)),
        "code": digest(read_json(code)) if code.exists() else None,
    }


def run_parameters(settings: TrainSettings, sections: Sections) -> dict[str, Any]:
    """Return the parameters that change the result. The pipeline's stage `code` records the same
    parameters, so a change that reruns training also invalidates its checkpoints."""
    verify = sections.verify
    return {
        "train": dataclasses.asdict(settings),
        "sampling": dataclasses.asdict(sections.sampling),
        "engine": {
            "name": engine_name(sections.engine),
            "dtype": sections.engine.dtype,
            **sections.engine.altering,
        },
        "verify": {
            "seconds": verify.seconds,
            "memory_gb": verify.memory_gb,
            "verifiers": verify.verifiers,
        },
    }


def build(
    run: stage.Stage, context: RunContext, sections: Sections, grader: BackgroundGrader
) -> tuple[Trainer, Plan]:
    """Return the trainer before its first step, and its plan."""
    policy, settings, files = context.policy, context.settings, input_files(run)
    tables = {name: PROMPTS.read(files[name]) for name in ("prompts", "validation")}
    check_validation(tables["validation"], files["validation"])
    is_ahead = settings.num_ahead > 0  # then the engine is never idle during an update
    of_engine = dataclasses.replace(sections.engine, sleep=sections.engine.sleep and not is_ahead)
    learner = make_learner(context, sections, of_engine)
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    # the length of a prompt is checked when it is encoded
    encode = partial(
        encode_prompts, tokenizer=tokenizer, policy=policy, room=context.sampling.max_tokens
    )
    prompts, validation = (Prompts(table, encode) for table in tables.values())
    plan = read_plan(PLAN.read(files["plan"]), prompts.ids, settings.batch)
    profile = Profile(SAMPLES.read(files["samples"]), prompts)
    cell = read_budget(run.layout.plan(*run.coordinates()) / "budget.json")
    budget = None if cell is None else RunBudget(cell, settings.batch.size)
    for folder in recipes.runs_of(dataclasses.asdict(settings)):
        check_vocabulary(policy, folder / "policy", "train.replay.folders: the policy")
    slots = load_slots(settings, plan, prompts.table, profile)
    check_noise(settings, slots.control.reads_noise, context.ranks.size)
    longest = longest_sample(plan, prompts, validation, sections)
    logs = run.layout.engine_logs("train@{}-{}".format(*run.coordinates()))
    engine = load_engine(of_engine, policy, learner.model, longest=longest, logs=logs)
    if is_ahead and engine.shares_weights:  # the shared weights change while it samples
        engine = load_engine(of_engine, policy, None)
    beside = dataclasses.replace(context, ranks=context.ranks.beside()) if is_ahead else context
    collector = Collector(beside, engine, slots.generate, tokenizer, grader)
    state = State(progress=0.0 if budget is None else budget.first_share)
    gaps = sections.guards.max_sampler_gap
    # the difference that the coarser dtype of engine and trainer may cause
    max_gap, coarser = max((getattr(gaps, d), d) for d in (of_engine.dtype, settings.dtype))
    trainer = Trainer(
        context,
        slots,
        learner,
        collector,
        queue_for(settings)(settings, context.seed, slots, collector, prompts, budget),
        prompts,
        validation,
        sections.guards,
        weights_for(settings)(learner, collector, prompts, slots.loss, state, max_gap, coarser),
        state,
        budget,
        read_demonstrations(
            settings.warm_start, context.sampling.max_tokens, prompts, profile, tokenizer
        ),
    )
    # fail before anything is sampled if a slot requests features that cannot be computed, or if the
    # engine rejects the weights; with 4-bit weights the policy also differs from the folder's
    check_layer(trainer.features(), policy.architecture.num_layers)
    if not settings.in_flight_updates:  # the loop does it for in-flight updates
        trainer.weights.load()
    return trainer, plan


def check_validation(table: pl.DataFrame, path: Path) -> None:
    """Raise ArtifactError if there are no prompts to measure the curve on."""
    if table.is_empty():
        raise ArtifactError(
            f"{path} has no prompts, but train measures its curve on them: set "
            "ingest.splits.validation to at least 1"
        )


def check_noise(settings: TrainSettings, reads_noise: bool, num_processes: int) -> None:
    """Raise ParamsError for a control that measures gradients, if each process has only a part."""
    if reads_noise and num_processes > 1:
        raise ParamsError(
            f"train.control {settings.control['method']} measures gradients in one process, and "
            f"engine.num_processes is {num_processes}: set it to 1"
        )


def check_layer(features: Features | None, last: int) -> None:
    """Raise ParamsError for hidden states of a layer that the policy does not have."""
    layer = None if features is None else features.hidden_layer
    if layer is not None and not -last - 1 <= layer <= last:
        raise ParamsError(
            f"train.advantage.layer is {layer}, but the policy has {last} layers: use 0 (the "
            f"embeddings) to {last}, or -1 (the last) to {-last - 1}"
        )


def longest_sample(
    plan: Plan, prompts: Prompts, validation: Prompts, sections: Sections
) -> int | None:
    """Return the number of tokens of the longest prompt plus the longest completion, for which vLLM
    reserves memory; None for other engines, and if the plan has more than MAX_ENCODED prompts."""
    rows = np.unique(plan.prompt_rows_V)
    if engine_name(sections.engine) not in ("vllm", "server") or len(rows) > MAX_ENCODED:
        return None
    encoded = [*prompts.token_ids(rows), *validation.token_ids(np.arange(len(validation)))]
    return max(map(len, encoded)) + sections.sampling.max_tokens


def make_learner(context: RunContext, sections: Sections, engine: EngineSettings) -> Learner:
    """Return the learner of the initial policy in float32 (the optimizer's precision). Raise
    ArtifactError if it does not fit on the device together with the engine."""
    policy, settings, memory = context.policy, context.settings, sections.learner
    device = torch_device(engine.device)
    lora, model = settings.lora, None
    is_quantized = lora is not None and lora.base_bits == 4
    by_rows = sharding_of(settings, memory, context.ranks, device)
    if by_rows is not None and lora is not None:
        model = load_adapted(policy, lora, context.seed, by_rows, device)
        by_rows = None
    if model is None:
        # a whole policy may not fit the device
        is_large = is_quantized or (memory.shard != "none" and by_rows is None)
        model = load_model(
            policy.folder,
            dtype=torch.float32,
            device=torch.device("cpu") if is_large else device,
            trust_remote_code=policy.trust_remote_code,
            shard=by_rows,
        )
        if lora is not None:
            add_adapters(model, lora, context.seed)
    if is_quantized:
        quantize_base(model, device)
    needed = memory_of(model, settings, memory, context.ranks.size)
    check_shared_gpu(engine, context.ranks.size, device, needed)
    return Learner(
        policy=policy,
        model=model,
        settings=settings,
        memory=memory,
        sampling=context.sampling,
        ranks=context.ranks,
        device=device,
    )


def length_of(budget: RunBudget | None, plan: Plan) -> Length:
    """Return the length of the whole run: its budget, or the rollouts of its plan."""
    if budget is None:
        return Length(plan.num_rollouts())
    account = budget.cell.account
    unit = f" {'' if account in GENERATED else 'FLOPs '}{account}"
    return Length(budget.cell.amount, unit)


def summarize(state: State) -> None:
    """Log the results of the run in one line."""
    first, last = state.curve[0], state.curve[-1]
    mixed: Any = sum(row["num_mixed_groups"] for row in state.steps)
    groups: Any = sum(row["num_prompts"] for row in state.steps)
    logger.info(
        "%d steps, %d rollouts, %d of %d groups mixed; validation accuracy %.3f -> %.3f",
        state.num_steps,
        last["rollouts"],
        mixed,
        groups,
        first["accuracy"],
        last["accuracy"],
    )
