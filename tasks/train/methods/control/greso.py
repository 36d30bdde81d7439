"""`greso`: skip prompts whose last groups taught nothing, before they are sampled (GRESO, arXiv
2506.02177).

From the second pass on a prompt whose last z groups were all correct is skipped with probability 1
- max(p_easy^z, floor), one whose last z were all wrong with 1 - max(p_hard^z, floor); a mixed group
resets z, and one of which nothing could be graded leaves it. The two p move by `step` a training
step within [p_min, p_max]: down while the share of all-correct (all-wrong) groups among those
sampled is at its target or above. The target is `dead_rate`, a third of it for all-correct groups.
Left out: the paper's growing batches."""

from collections.abc import Sequence

import numpy as np

from tasks.common.params import share
from tasks.train.methods.control import plan
from tasks.train.methods.control.plan import progress
from tasks.train.rollouts import Ints, Request, Rollouts, State, mixed_groups
from tasks.train.settings import BatchSettings

__all__ = ["describe", "next", "observe", "progress", "start"]

EASY_SHARE = 1 / 3  # of the target rate of dead groups


def start(
    columns: dict[str, Ints],
    batch: BatchSettings,
    *,
    dead_rate: float,
    step: float,
    floor: float,
    p_start: float,
    p_min: float,
    p_max: float,
) -> State:
    """The plan's state, each prompt's streak (positive: all correct, negative: all wrong), and the
    two p."""
    share(
        train__control__dead_rate=dead_rate,
        train__control__floor=floor,
        train__control__p_start=p_start,
    )
    share(train__control__p_min=p_min, train__control__p_max=p_max)
    return {
        **plan.start(columns, batch),
        "streak": np.zeros(int(columns["prompt_row"].max()) + 1, dtype=np.int64),
        "p": np.array([p_start, p_start]),  # easy, hard
        "targets": np.array([EASY_SHARE, 1 - EASY_SHARE]) * dead_rate,
        "settings": np.array([step, floor, p_min, p_max]),
        "visits": np.array([0, 0]),  # taken, skipped
    }


def next(state: State, so_far: Sequence[Rollouts], rng: np.random.Generator) -> Request | None:
    """The next visits of one phase that are not skipped, up to a batch of them; None when drawn, or
    at the end."""
    while not so_far and not plan.at_end(state):
        first = int(state["position"])
        sizes = plan.visits_of_phase(state, first)
        taken = rng.random(len(sizes)) >= skip_probability(state, first + np.arange(len(sizes)))
        if not taken.any():
            state["position"] = np.array(first + len(sizes))
            state["visits"] = state["visits"] + [0, len(sizes)]
            continue
        places = np.flatnonzero(taken)
        num = plan.num_visits(state, sizes[places], int(state["size"]))
        past = int(places[num - 1]) + 1 if num < len(places) else len(sizes)
        state["visits"] = state["visits"] + [num, past - num]
        return plan.take(state, first + places[:num], sizes[places[:num]], first + past)
    return None


def skip_probability(state: State, visits: Ints) -> np.ndarray:
    """How likely each visit is skipped; never in the first pass."""
    streak = state["streak"][state["prompt_row"][visits]]
    p = np.where(streak > 0, state["p"][0], state["p"][1])
    kept = np.maximum(p ** np.abs(streak), state["settings"][1])
    return np.where((state["pass"][visits] > 0) & (streak != 0), 1.0 - kept, 0.0)


def observe(state: State, rollouts: Rollouts) -> None:
    """Lengthen or reset the streaks of the step's prompts, and move the two p."""
    graded, num_groups = ~rollouts.is_error_B(), len(rollouts.prompt_rows_Q)
    rewards_B, group_B = rollouts.rewards_B[graded], rollouts.group_B[graded]
    size_Q = np.bincount(group_B, minlength=num_groups)
    dead_Q = ~mixed_groups(rewards_B, group_B, num_groups) & (size_Q > 0)
    easy_Q = dead_Q & (np.bincount(group_B, rewards_B, num_groups) > 0)
    streak = state["streak"].copy()
    for row, is_dead, is_easy, size in zip(
        rollouts.prompt_rows_Q, dead_Q, easy_Q, size_Q, strict=True
    ):
        if size == 0:
            continue  # nothing of the group was graded, and nothing is known
        sign = 1 if is_easy else -1
        streak[row] = sign * (max(sign * streak[row], 0) + 1) if is_dead else 0
    state["streak"] = streak
    if not graded.any():
        return
    step, _, lowest, highest = state["settings"]
    shares = np.array([easy_Q.sum(), (dead_Q & ~easy_Q).sum()]) / int((size_Q > 0).sum())
    moved = state["p"] + np.where(shares >= state["targets"], -step, step)
    state["p"] = np.clip(moved, lowest, highest)


def describe(state: State) -> dict[str, float]:
    """The share of visits that were skipped so far, and the two p."""
    taken, skipped = state["visits"].tolist()
    easy, hard = state["p"].tolist()
    return {"skipped_rate": skipped / max(taken + skipped, 1), "p_easy": easy, "p_hard": hard}
