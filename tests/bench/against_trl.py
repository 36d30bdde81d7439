"""Winnow's trainer, with `grpo` and with `winnow`, against TRL's GRPOTrainer: the same policy,
prompts, rollouts a step, lengths, loss and optimizer.

    make bench        # installs requirements/trl.txt beside the environment's pins, then runs
    this and `compiled`
    python -m tests.bench.against_trl [--steps 160] [--rollouts 32] [--repeats 2] [--warmup 5]
    [--learning-rates 3e-4 6e-4 1.2e-3] [--large | --data ROOT]

With several learning rates every side first runs each rate once, with a separate seed, and
continues with the rate of the best held-out accuracy. Each run is a separate process with one
thread (`side_winnow.py`, `side_trl.py`). The sides alternate, A B C A B C, with a new seed each
time, because other jobs may share the machine: only ratios within one call are meaningful. The
training loop after the warm-up steps is timed: sampling, grading, update, optimizer. Validation,
checkpoints, logging and tracking are off on all sides. Policies are saved at a few points, outside
the timing, and evaluated afterwards by Winnow's evaluation on the same held-out prompts, to compare
learning per second as well as rollouts per second. With `--large` the policy is the large one of
`tests.bench.world`; its rewards are random, so only its speed is compared. With `--data` policy,
prompts and dtypes are those of a data root, only speed is compared, and TRL first runs two steps in
each of float32 and bf16, and continues with the faster.

The sides differ in what Winnow does by design: groups without a gradient are excluded from the
update, a prompt is prefilled once for its group, the verifier is a separate process, and every
rollout is recorded."""

import argparse
import importlib
import importlib.metadata
import itertools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.clock import Job
from tests.bench.peak import in_new_process
from tests.bench.world import make_world

SIDES = ("grpo", "winnow", "trl")
Report = dict[str, Any]


def measure(job: Job) -> Report:
    """Run one side in this process."""
    module = importlib.import_module(f"tests.bench.side_{'trl' if job.side == 'trl' else 'winnow'}")
    report: Report = module.measure(job)
    return report


def run_side(
    side: str,
    root: Path,
    steps: int,
    seed: int,
    points: list[int],
    learning_rate: float | None = None,
    is_mixed: bool = False,
) -> Report:
    """Run one side in its own process, and return its report."""
    out = root / f"{side}-{seed}-{learning_rate or 0:g}"
    job = Job(side, root, out, steps, seed, points, learning_rate, is_mixed)
    report: Report = in_new_process(measure, job)
    return report


def speeds(report: Report, warmup: int, rollouts: int) -> Report:
    """Return the rates after the warm-up, from the end times of the steps."""
    wall, cpu, generation = (
        report[name][-1] - report[name][warmup] for name in ("wall", "cpu", "generation")
    )
    tokens, steps = report["completion_tokens"][warmup:], len(report["wall"]) - 1 - warmup
    ends = report["wall"][warmup:]
    return {
        "rollouts/s": rollouts * steps / wall,
        "completion tokens/s": sum(tokens) / wall,
        "rollouts per CPU second": rollouts * steps / cpu,
        "seconds a step (median)": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "seconds a step of generation (mean)": generation / steps,
        "seconds a step of all else (mean)": (wall - generation) / steps,
        "mean completion length": sum(tokens) / (rollouts * steps),
        "peak memory, MB": report["peak_mb"] + report["children_mb"],
    }


def accuracy(root: Path, folder: Path) -> float:
    """Return held-out pass@1 of the policy in `folder`, as the stage `evaluate` measures it."""
    import torch

    from tasks.common import params
    from tasks.common.artifacts import PROMPTS, Layout
    from tasks.common.checksums import read_checked
    from tasks.evaluate.evaluation import evaluate_policy
    from tasks.evaluate.settings import Evaluate
    from tasks.grading.settings import Verify
    from tasks.models.folder import policy_digest
    from tasks.models.policy import open_policy
    from tasks.store.fixed_policy import SamplerSettings

    torch.set_num_threads(1)
    layout, values = Layout(root), params.load(root / "params.yaml")
    policy = open_policy(folder, policy_digest(folder), read_checked(layout.policy_card))
    prompts = PROMPTS.read(layout.prompts("validation"))
    settings, sampler = Evaluate(4, [1], 200), params.sections(values, SamplerSettings)
    verify = params.section(values, "verify", Verify)
    metrics, _ = evaluate_policy(
        prompts, policy, settings, sampler, verify, layout, folder.name, root / "evaluated"
    )
    return float(metrics["pass_at_1"])


def curves(root: Path, reports: dict[str, list[Report]]) -> dict[str, list[Report]]:
    """Return, for each side, mean held-out accuracy and median training seconds at each number of
    steps."""
    start = accuracy(root, root / "policy")
    result = {}
    for side, runs in reports.items():
        points = [
            [{**p, "accuracy": accuracy(root, Path(p["folder"]))} for p in run["points"]]
            for run in runs
        ]
        result[side] = [{"step": 0, "seconds": 0.0, "accuracy": start}] + [
            {
                "step": same[0]["step"],
                "seconds": statistics.median(p["seconds"] for p in same),
                "accuracy": statistics.mean(p["accuracy"] for p in same),
            }
            for same in zip(*points, strict=True)
        ]
    return result


def seconds_to(curve: list[Report], target: float) -> float | None:
    """Return the time at which a curve first reaches `target`, by linear interpolation; None if it
    never does."""
    for before, after in itertools.pairwise(curve):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
    return None


def speed_table(reports: dict[str, list[Report]], warmup: int, rollouts: int) -> str:
    """Return a table of medians over the repeats, with ratios to TRL."""
    runs = {side: [speeds(report, warmup, rollouts) for report in reports[side]] for side in SIDES}
    lines = ["| | grpo | winnow | TRL | grpo / TRL | winnow / TRL |", "|---|---|---|---|---|---|"]
    for name in runs["trl"][0]:
        found = {side: statistics.median(run[name] for run in runs[side]) for side in SIDES}
        theirs = found["trl"] or float("nan")
        shares = [f"{found[side] / theirs:.2f}" for side in ("grpo", "winnow")]
        lines.append(f"| {name} | {' | '.join([f'{found[s]:,.4g}' for s in SIDES] + shares)} |")
    return "\n".join(lines)


def curve_table(found: dict[str, list[Report]]) -> str:
    """Return the held-out accuracy by steps, and the seconds to the best accuracy that a recipe and
    TRL both reach."""
    lines = [
        f"| steps | {' | '.join(f'{side}: seconds | accuracy' for side in SIDES)} |",
        f"|{'---|' * (1 + 2 * len(SIDES))}",
    ]
    for points in zip(*(found[side] for side in SIDES), strict=True):
        cells = [f"{x[name]:.3g}" for x in points for name in ("seconds", "accuracy")]
        lines.append(f"| {points[0]['step']} | {' | '.join(cells)} |")
    for side in ("grpo", "winnow"):
        target = min(max(p["accuracy"] for p in found[one]) for one in (side, "trl"))
        ours, theirs = (seconds_to(found[one], target) for one in (side, "trl"))
        if ours and theirs:
            lines.append(
                f"\nheld-out accuracy {target:.3f}: {side} {ours:.1f} s, TRL {theirs:.1f} s "
                f"({theirs / ours:.2f}x)"
            )
    return "\n".join(lines)


def tuned(root: Path, steps: int, seed: int, rates: list[float]) -> dict[str, float | None]:
    """Return the learning rate of each side: the rate with the best final held-out accuracy, from
    one run each."""
    chosen: dict[str, float | None] = dict.fromkeys(SIDES, rates[0] if rates else None)
    if len(rates) < 2:
        return chosen
    for side in SIDES:
        reached = {}
        for rate in rates:
            report = run_side(side, root, steps, seed, [steps], rate)
            reached[rate] = accuracy(root, Path(report["points"][-1]["folder"]))
        chosen[side] = max(reached, key=lambda rate: reached[rate])
        shown = ", ".join(f"{rate:g}: {found:.3f}" for rate, found in reached.items())
        print(f"{side}: learning rate {chosen[side]:g} of {shown}", flush=True)
    return chosen


def is_faster_mixed(root: Path, seed: int) -> bool:
    """Return whether TRL's second step takes less time in bf16 than in float32."""
    taken = {}
    for is_mixed in (False, True):
        wall = run_side("trl", root, 2, seed, [], is_mixed=is_mixed)["wall"]
        taken[is_mixed] = wall[2] - wall[1]
    print(
        f"TRL: a step of {taken[False]:.3g} s in float32, {taken[True]:.3g} s in bf16", flush=True
    )
    return taken[True] < taken[False]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rollouts", type=int, default=32, help="a step, in groups of 8")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--learning-rates", type=float, nargs="*", default=[], help="to choose of")
    parser.add_argument("--large", action="store_true", help="a policy of 24 million parameters")
    parser.add_argument("--data", type=Path, help="a data root with a policy and prompts")
    options = parser.parse_args()
    if options.steps <= options.warmup:
        parser.error("--steps must exceed --warmup: the steps after the warm-up are timed")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TRL_EXPERIMENTAL_SILENCE": "1"}
    shares = () if options.large or options.data else (0.125, 0.25, 0.5, 1.0)
    points = [round(options.steps * share) for share in shares]
    reports: dict[str, list[Report]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "world"
        make_world(
            root,
            steps=options.steps,
            rollouts=options.rollouts,
            seeds=options.repeats + 1,
            large=options.large,
            data=options.data,
        )
        is_mixed = bool(options.data) and is_faster_mixed(root, options.repeats)
        rates = tuned(root, options.steps, options.repeats, options.learning_rates)
        for seed in range(options.repeats):
            for side in SIDES:
                arguments = (side, root, options.steps, seed, points, rates[side], is_mixed)
                reports[side].append(run_side(*arguments))
        table = speed_table(reports, options.warmup, options.rollouts)
        found = curves(root, reports) if points else {}
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers", "torch")
    )
    print(
        f"{options.steps} steps of {options.rollouts} rollouts, medians of {options.repeats}; "
        f"{versions}; one thread\n"
    )
    print("\n\n".join([table, *([curve_table(found)] if found else [])]))


if __name__ == "__main__":
    main()
