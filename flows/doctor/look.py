"""`--look`: what the profile will cost, and for which recipes it is expected to pay, from samples
of a few prompts. The store keeps the samples, as part of the later profile."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
from tabulate import tabulate

from flows.doctor.forecast import known_values
from tasks.allocate import budget
from tasks.allocate.first_look import NUM_DRAWS, Estimate, finite, look_at, share_of
from tasks.allocate.planning import EmptyPlanError, load_strategy
from tasks.common import recipes
from tasks.common.artifacts import PROMPTS
from tasks.common.checksums import read_note
from tasks.common.layout import Layout
from tasks.common.params import ParamsError, section, sections
from tasks.common.statistics import bootstrap_interval
from tasks.grading.settings import Verify
from tasks.models.policy import read_policy
from tasks.profile.profile import summarize
from tasks.profile.run import sample
from tasks.profile.settings import ProfileSettings
from tasks.store.fixed_policy import SamplerSettings, StoredRollouts

Values = Mapping[str, Any]


def look(values: Values, layout: Layout, num: int) -> str:
    """Sample `num` random training prompts as `profile` would, and return what follows. Raise
    ParamsError if the prompts or the policy are not made yet."""
    path, source = layout.prompts("train"), values["policy"]["source"]
    if not path.exists() or read_note(layout.policy_card).get("source") != source:
        raise ParamsError(
            f"--look needs the prompts and the policy {source}, and {layout.root} lacks them: "
            "`winnow run --until ingest policy` makes them"
        )
    prompts = PROMPTS.read(path)
    profile, seconds = sampled(values, layout, prompts.sample(min(num, len(prompts)), seed=0))
    costs = about(profile, len(prompts), seconds)
    return "\n".join([*costs, *paying(values, layout, profile, len(prompts))])


def sampled(values: Values, layout: Layout, prompts: pl.DataFrame) -> tuple[pl.DataFrame, float]:
    """Return the PROFILE of these prompts, and the seconds that sampling takes."""
    settings = section(values, "profile", ProfileSettings)
    stored = StoredRollouts(
        *(prompts, read_policy(layout), settings.num_samples),
        *(sections(values, SamplerSettings), layout),
        cell="look",
        greedy=False,
    )
    with TemporaryDirectory(dir=layout.root) as folder:
        profile, *_ = sample(stored, settings, section(values, "verify", Verify), Path(folder))
    return profile, float(stored.costs()["seconds"].sum())


def about(profile: pl.DataFrame, population: int, seconds: float) -> Iterator[str]:
    """Yield the shares of the prompts that were looked at, and the cost of the whole profile."""
    times, summary = population / len(profile), summarize(profile)
    num, samples = len(profile) - summary["num_ungraded"], profile["num_samples"].to_numpy()
    mean, rates = summary["pass_rate_mean"], profile["pass_rate_unbiased"].drop_nulls().to_numpy()
    bounds = np.array(bootstrap_interval(rates, NUM_DRAWS, np.random.default_rng(0)))
    low, high = mean + (bounds - mean) * finite(num, population)
    never, always = (
        percent(share_of(summary[name], num, population))
        for name in ("never_solved", "always_solved")
    )
    tokens = samples @ profile["prompt_tokens"].to_numpy() + profile["completion_tokens"].sum()
    yield (
        f"{num} of {population:,} training prompts, {samples.mean():.3g} samples each: never "
        f"solved {never}, always {always}; mean pass rate {mean:.2f} "
        f"({low:.2f} to {high:.2f})"
    )
    yield (
        f"the profile of all prompts: about {samples.sum() * times:,.0f} rollouts, "
        f"{tokens * times:,.0f} tokens and {seconds * times:,.0f} s at the speed of these; the "
        "store keeps these samples"
    )


def percent(estimate: Estimate) -> str:
    value, low, high = estimate
    return f"{value:.0%} ({low:.0%} to {high:.0%})"


def paying(values: Values, layout: Layout, profile: pl.DataFrame, population: int) -> Iterator[str]:
    """Yield a table of the passes from which each recipe's profile pays, and a sentence each."""
    world = known_values(values, layout)
    ratio = world.rates.rollouts.middle / world.rates.updates.middle if world else None
    rows, sentences = list[list[str]](), list[str]()
    for name in values["experiment"]["recipes"]:
        recipe = recipes.recipe(values, name)
        if not load_strategy(recipe["allocate"])[0].reads_profile:
            if budget.is_profile_charged(recipe):
                sentences.append(f"{name}: its slots read the profile, and its plan does not")
            continue
        try:
            compared = budget.compared_plan(values, profile, name)
        except EmptyPlanError:
            sentences.append(f"{name}: it would keep none of these prompts")
            continue
        found = look_at(compared, population, ratio)
        rows += [[name, account, *map(words, pair)] for account, pair in found.items()]
        sentences.append(sentence(name, *found["executed"], values["allocate"]["passes"]))
    if rows:
        yield "passes from which the profile pays (95 % interval over prompts):"
        yield tabulate(rows, ["recipe", "account", "per pass", "per mixed rollout"], "plain")
    yield from sentences


def words(estimate: Estimate) -> str:
    """Return the number of passes with its interval; infinity is `never`."""
    value, low, high = ("never" if np.isinf(each) else f"{each:.2g}" for each in estimate)
    return f"{value} ({low} to {high})"


def sentence(name: str, per_pass: Estimate, per_mixed: Estimate, passes: int) -> str:
    """Return whether the profile pays within the planned passes, in `executed`."""
    return (
        f"{name}: within {passes} passes its profile {verdict(per_pass, passes)} per pass, and "
        f"{verdict(per_mixed, passes)} per rollout of a mixed group (executed)"
    )


def verdict(estimate: Estimate, passes: int) -> str:
    _, low, high = estimate
    if high <= passes:
        return "is expected to pay"
    return "may pay or not" if low <= passes else "is not expected to pay"
