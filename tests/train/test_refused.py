"""Refused settings: values out of range, and settings that exclude each other."""

from typing import Any

import pytest

from tasks.common import recipes
from tasks.common.params import ParamsError
from tasks.common.registry import names
from tasks.train.loading import completed, settings_of
from tasks.train.methods import loss
from tests.parameters import every_value

WINNOW = recipes.recipe(every_value(), "winnow")["train"]
A_STAR = {"advantage": {"method": "a_star"}, "loss": {"method": "regression"}}
DISTIL = {"loss": {"method": "distil"}}
WARM = {"warm_start": {"data": "profile"}}
TAUGHT = {"reference": {"source": "teacher"}}
KL = {"kl_coefficient": 0.1}
RESET = {"reference": {"reset_every": 2}}
BONUS = {"loss": {"method": "clip", "entropy": {"coefficient": 0.1}}}
ONE_SIDED = {"advantage": {"method": "one_sided"}}
LENGTH = {"shape": [{"method": "length"}]}
RECENT = {"replay": {"method": "recent", "share": 0.5, "capacity": 64}}
EXPERIENCE = {"control": {"method": "experience"}, "replay": {"method": "successes"}}
SURPLUS = {"max_staleness": 1, "over_provision": 1.5}
IN_FLIGHT = {"max_staleness": 1, "in_flight_updates": True}
KEPT = {"batch": {"counts": "kept"}}
PODS = {"select": {"method": "pods", "keep": 2}}
PROXIMAL = {"max_staleness": 1, "correction": {"proximal": {"method": "snapshot"}}}
NAT = {"shape": [{"method": "nat"}]}
KL_COV = {"loss": {"method": "kl_cov"}, "updates": {"epochs": 2}}
GMPO, VESPO, SAPO = ({"loss": {"method": name}} for name in ("gmpo", "vespo", "sapo"))


def correction(**settings: Any) -> dict[str, Any]:
    return {"correction": settings}


def of(slot: str, method: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a method."""
    spec = {"method": method, **settings}
    return {slot: [spec] if slot == "shape" else spec}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # the run
    ({"max_staleness": -1}, "max_staleness"),
    ({"validation": {"every_share": 0.0}}, "above 0 and at most 1"),
    ({"validation": {"every_share": 1.5}}, "above 0 and at most 1"),
    ({"optimizer_bits": 16}, r"train\.optimizer_bits is 16; allowed: 32, 8"),
    ({"lora": {"rank": 0, "alpha": 8.0}}, r"lora\.rank is 0"),
    ({"branches": [0.5, 0.25]}, r"train.branches is \[0.5, 0.25\]; .* ascending"),
    ({"branches": [0.5, 1.0]}, "below 1"),
    ({"branches": [0.5], "decay_share": 1.0}, "needs train.decay_share below 1"),
    ({**WARM, **KL}, "warm_start moves the policy away from the reference"),
    ({"over_provision": 0.5, "max_staleness": 1}, "over_provision is 0.5"),
    ({"over_provision": 2.1, "max_staleness": 1}, "over_provision is 2.1"),
    ({"over_provision": 1.5}, "set train.max_staleness to 1 or more"),
    ({**SURPLUS, **of("generate", "micro_groups")}, "micro_groups, which cannot stop"),
    ({**SURPLUS, **of("control", "dapo")}, "may request more after a step's"),
    ({**SURPLUS, **of("control", "sagc", max_refills=1)}, "may request more after a step's"),
    ({**SURPLUS, **of("control", "dars")}, "may request more after a step's"),
    ({**IN_FLIGHT, "max_staleness": 0}, "max_staleness 0 it never samples during an update"),
    ({**IN_FLIGHT, **SURPLUS}, "1 beside over_provision it never .* to 2 or more"),
    ({**IN_FLIGHT, **of("generate", "multi_turn")}, "train.generate.method is multi_turn"),
    ({**KEPT, **PODS, **RECENT}, r"train\.replay stores whole groups"),
    (KEPT, "does not keep a fixed number of every group"),
    # references
    (DISTIL, "train.loss distil needs a teacher: set train.reference.source"),
    (TAUGHT, "train.reference.source is teacher, but nothing uses"),
    ({**TAUGHT, **A_STAR}, "compares the policy with the initial one, but train.reference.source"),
    ({**TAUGHT, **DISTIL, **ONE_SIDED}, "train.loss distil trains on all"),
    ({"reference": {"reset_every": 0}}, r"reference.reset_every is 0; it must be at least 1"),
    (RESET, r"reset_every is 2, but nothing uses it"),
    ({**RESET, **KL, "lora": {"rank": 2, "alpha": 4.0}}, "is the policy without its adapters"),
    ({**KL, "reference": {"source": "there", "reset_every": 2}}, "the reference is a teacher: set"),
    ({**RESET, **A_STAR}, "with the initial one, but train.reference.reset_every is 2"),
    ({**A_STAR, **ONE_SIDED}, "train.loss regression trains on all"),
    ({**A_STAR, **WARM}, "train.loss regression compares the policy"),
    ({**A_STAR, **LENGTH}, "train.advantage a_star needs the verifier's rewards"),
    ({**A_STAR, **correction(m2po=0.04)}, r"train.loss regression also trains on those"),
    *(
        ({**A_STAR, **of("shape", name)}, f"shape {name} sets advantages of tokens to 0")
        for name in ("entropy_mask", "cov_mask")
    ),
    # corrections
    ({**PROXIMAL, "max_staleness": 0}, "set max_staleness to 1 or more"),
    (correction(proximal={"method": "ewma", "decay": 1.5}), "correction.proximal.decay is 1.5"),
    ({**PROXIMAL, **correction(proximal={}, ratio_to="sampler")}, "set ratio_to to old"),
    (correction(m2po=0), r"train.correction.m2po is 0.0; it must be above 0"),
    (correction(floor=3.0), r"train.correction.floor is 3"),
    (correction(reject={"low": 2.0, "high": 1.0}), "high must be above low"),
    ({**of("loss", "vespo"), **correction(level="sequence")}, "level is sequence: set it to token"),
    # controls and replay
    ({**of("control", "noise_scale"), "max_staleness": 1}, "train.max_staleness to 0"),
    ({**of("control", "noise_scale"), "updates": {"epochs": 2}}, "epochs and minibatches to 1"),
    (of("control", "noise_scale", first=0), r"train\.control\.first is 0; it must be at least 1"),
    (of("control", "greso", p_max=1.5), r"train\.control\.p_max is .*; it must be from 0 to 1"),
    (of("control", "greso", floor=0.0), r"train\.control\.floor is 0.0; it must be above 0"),
    (of("control", "greso", p_min=0.5, p_max=0.4), r"p_max is 0.4; it must be at least 0.5"),
    (of("control", "sagc", threshold=0.0), r"train\.control\.threshold is 0.0"),
    (of("control", "sagc", memory=1.01), r"train\.control\.memory is .*; it must be from 0 to 1"),
    (of("control", "sagc", group_sizes=[1, 4]), "distinct sizes of at least 2"),
    (of("control", "sagc", group_sizes=[]), "distinct sizes of at least 2"),
    (of("control", "knapsack", discount=-1.0), r"train\.control\.discount is .*; it must be from"),
    (of("control", "information", update_cost=float("inf")), r"control\.update_cost is inf"),
    (of("control", "information", prior={"prompt_window": 0}), r"prior\.prompt_window is 0"),
    ({"control": EXPERIENCE["control"]}, "only if the control is experience"),
    ({"replay": EXPERIENCE["replay"]}, "only if the control is experience"),
    ({**EXPERIENCE, **SURPLUS}, "set over_provision to 1.0"),
    (of("replay", "coverage", n=0), r"train.replay.n is 0; it must be at least 1"),
    (of("replay", "coverage", capacity=0), r"train.replay.capacity is 0"),
    (of("select", "random", keep=0), r"train\.select\.keep is 0"),
    # advantages
    (of("advantage", "a_star", beta=0), "train.advantage.beta is 0"),
    (of("advantage", "mc_grpo", min_deviation=0.0), "min_deviation is 0.0; it must be above 0"),
    (of("advantage", "grpo_sample", epsilon=-1.0), "advantage.epsilon is -1.0"),
    (of("advantage", "pass_at", k=0), r"train.advantage.k"),
    (of("advantage", "posterior", update_cost=-1.0), r"train\.advantage\.update_cost is -1"),
    ({**WINNOW, **RECENT}, "include a replayed rollout itself: set train.replay none"),
    ({**WINNOW, **KL}, "needs the KL of all: set it to 0"),
    ({**WINNOW, "divisor": "kept"}, "set generated"),
    *(
        (
            {**of("advantage", name), **RECENT},
            rf"{name} compares a reward .* set train\.replay none",
        )
        for name in ("poise", "value_probe")
    ),
    *(
        ({**of("advantage", name), **LENGTH}, f"advantage {name} needs the verifier's rewards")
        for name in ("maxrl", "bnpo", "pass_at", "poise", "value_probe", "posterior")
    ),
    *(
        ({**of("advantage", name), "divisor": "kept"}, "divisor kept the step would grow")
        for name in ("one_sided", "mc_grpo")
    ),
    # losses
    (of("loss", "regression", beta=0), "train.loss.beta is 0"),
    (of("loss", "distil", reward_weight=-1.0), "train.loss.reward_weight is -1.0"),
    (of("loss", "distil", penalty=-1.0), "train.loss.penalty is -1.0"),
    (of("loss", "distil", max_fall=0.0), "train.loss.max_fall is 0.0"),
    (of("loss", "dgg", window=1), r"train.loss.window is 1; it must be at least 2"),
    (of("loss", "dgg", limit=0.0), r"train.loss.limit is 0.0; it must be above 0"),
    (of("loss", "dgg", dual=1.0), r"train.loss.dual is 1"),
    (of("loss", "vcpo", power=-1.0), "train.loss.power is -1.0"),
    (of("loss", "clip", clip_low=-0.1), "clip_low is -0.1; it must be at least 0"),
    (of("loss", "clip", dual=1.0), r"train.loss.dual is 1"),
    (of("loss", "clip", max_ratio=0.5), r"train.loss.max_ratio is 0.5"),
    (of("loss", "shaped", shaping=0.0), r"train.loss.shaping is 0.0; it must be above 0"),
    (of("loss", "kl_cov", share=0), r"train.loss.share is 0"),
    (of("loss", "kl_cov", penalty=-1), r"train.loss.penalty is -1"),
    (of("loss", "kl_cov"), r"first update: set train.updates.epochs or minibatches above 1"),
    ({**KL_COV, **correction(ratio_to="sampler")}, "train.correction.ratio_to to old"),
    (of("loss", "clip", entropy={"coefficient": -1.0}), r"entropy.coefficient is -1.0; it must be"),
    (of("loss", "clip", entropy={"target": 0.0}), r"entropy.target is 0.0; it must be above 0"),
    (of("loss", "clip", entropy={"step": 0.0}), r"loss.entropy.step is 0.0; it must be above 0"),
    (of("loss", "clip", entropy={"coefficient": 2.0}), r"coefficient is 2, above most \(1\)"),
    (of("loss", "clip", entropy={"coeficient": 1.0}), r"loss.entropy.coeficient is unknown"),
    ({**ONE_SIDED, **BONUS}, r"train.loss.entropy needs the entropy of all"),
    ({**ONE_SIDED, **of("loss", "clip", entropy={"target": 0.1})}, "needs the entropy of all"),
    # shapes
    ({"shape": [{"share": 0.5}]}, r"train.shape.method is missing; use one of .*overlong"),
    (of("shape", "overlong", shares=0.5), "share"),
    (of("shape", "overlong", share=2.0), "train.shape.share is 2"),
    (of("shape", "cov_mask", low=5.0), "low must be below high"),
    (of("shape", "pruned_po", drop=1.0), "drop is 1; it is at least 0 and below 1"),
    (of("shape", "cppo", drop=1.0), "drop is 1; it is at least 0 and below 1"),
    (of("shape", "nll", weight=-1), r"train.shape.weight is -1"),
    *(
        ({**of("shape", "failures"), **dropping}, "failures acts on groups of failures")
        for dropping in (of("select", "mixed"), of("select", "pods", keep=2, drop_dead=True))
    ),
    *(
        (
            {**of("shape", "nll"), **of("select", "mixed"), **other},
            "divisor and train.advantage_over",
        )
        for other in ({}, {"divisor": "kept", "advantage_over": "pool"})
    ),
    *((of(slot, "gdro", width=0.0), f"{slot}.width is 0.0; it") for slot in ("control", "shape")),
    (of("shape", "gdro", most=0.5), "train.shape.most is 0.5; it must be at least 1"),
    *(
        ({**NAT, **changes}, f"train.shape nat trains on a part.*{reads}")
        for changes, reads in (
            (GMPO, "train.loss.method gmpo"),
            (VESPO, "train.loss.method vespo"),
            (SAPO, "train.loss.normalize sequence"),
            (of("loss", "clip", ratio="sequence"), "train.loss.ratio sequence"),
            (of("loss", "dppo", penalty=0.1), "train.loss.penalty"),
            (correction(level="geometric"), "train.correction.level geometric"),
            (correction(reject={"whole_rows": True}), "train.correction.reject.whole_rows"),
        )
    ),
    *(
        ({**of("shape", name, **settings), **other}, f"shape {name} drops rollouts of advantage 0")
        for name, settings in (
            ("pruned_po", {}),
            ("cppo", {}),
            ("kondo", {"keep": 0.5}),
            ("nat", {}),
        )
        for other in ({"divisor": "kept"}, {"kl_coefficient": 0.1})
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        settings_of(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {**TAUGHT, **KL},
        {**NAT, **of("loss", "clip", normalize="prompt")},
        {**of("advantage", "maxrl"), **of("shape", "truncated")},
        {**of("shape", "failures"), **PODS},
        {**of("shape", "nll"), **of("select", "mixed"), "divisor": "kept"},
        {**A_STAR, **of("shape", "truncated")},
        of("loss", "vespo"),
        KL_COV,
        {**of("loss", "kl_cov"), "updates": {"minibatches": 2}},
        correction(level="geometric", reject={"whole_rows": True}),
    ],
)
def test_other_settings_than_those_of_recipes_are_accepted(changes: dict[str, Any]) -> None:
    settings_of(changes)


def test_defaults_of_a_method_are_filled_in() -> None:
    assert settings_of(LENGTH).shape == [{"method": "length", "weight": 0.1}]
    for name in names(loss):
        found = completed("loss", {"method": name, "entropy": {"coefficient": 0.5}})
        assert found["entropy"] == {"coefficient": 0.5, "target": None, "step": 0.005, "most": 1.0}
