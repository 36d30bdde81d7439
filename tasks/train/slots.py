"""The slots of the loop: which file fills each, with its settings bound. See `batch.py` for the
arrays.

    control.start(plan, batch) -> state                         plan: prompt_row, group_size, phase,
    pass of each visit
    control.next(state, so_far, rng) -> Request | None          asked again within a step until None
    control.observe(state, rollouts)                            after the step
    control.progress(state) -> float                            share of the plan that is done, for
    the schedule
    control.describe(state) -> {name: value}                    after the step, for the record
    generate.start(num_prompts) -> state
    generate.generate(state, engine, draw) -> Samples           draw: prompts, counts, a seed a
    rollout, sampling
    generate.observe(state, rollouts)                           after the step
    select(rewards_B, group_B, rng) -> keep_B
    replay.start() -> state; replay.add(state, rollouts); replay.draw(state, rng) -> Rollouts | None
    advantage(rewards_B, group_B) -> A_B
    loss(logprobs_BT, sampler_logprobs_BT, A_B, mask_BT, totals) -> loss, stats      totals: of the
    whole step

State is a plain dict of arrays, changed in place and saved in checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tasks.common import registry
from tasks.common.params import ParamsError
from tasks.train.methods import advantage, control, generate, loss, replay, select
from tasks.train.settings import Spec, TrainSettings


@dataclass(frozen=True)
class Slots:
    """The methods of one run. The `start_` functions have the settings bound; state carries them
    on."""

    control: ModuleType
    start_control: Callable[..., Any]
    generate: ModuleType
    start_generate: Callable[..., Any]
    select: Callable[..., Any]
    replay: ModuleType
    start_replay: Callable[..., Any]
    advantage: Callable[..., Any]
    loss: Callable[..., Any]


def load_slots(settings: TrainSettings) -> Slots:
    """Import and bind the method of every slot; ParamsError names a slot's unknown method or
    setting."""
    control_module, start_control = load_slot(control, settings.control, "control", "start")
    generate_module, start_generate = load_slot(generate, settings.generate, "generate", "start")
    replay_module, start_replay = load_slot(replay, settings.replay, "replay", "start")
    functions = {
        name: load_slot(package, getattr(settings, name), name, name)[1]
        for name, package in (("select", select), ("advantage", advantage), ("loss", loss))
    }
    return Slots(
        control_module,
        start_control,
        generate_module,
        start_generate,
        replay=replay_module,
        start_replay=start_replay,
        **functions,
    )


def load_slot(
    package: ModuleType, spec: Spec, name: str, function: str
) -> tuple[ModuleType, Callable[..., Any]]:
    """The file that `spec["method"]` names in `package`, and its `function` with the other settings
    bound."""
    if "method" not in spec:
        raise ParamsError(
            f"train.{name}.method is missing; there is: {', '.join(registry.names(package))}"
        )
    module = registry.load(package, spec["method"], f"train.{name}.method")
    settings = {key: value for key, value in spec.items() if key != "method"}
    return module, registry.bind(
        getattr(module, function), settings, f"train.{name} ({spec['method']})"
    )
