"""The parts of the scheduling benchmark that could be wrong without showing."""

import numpy as np
import pytest

from tasks.train.methods.generate.micro_groups import queue
from tests.bench.lengths import Step, log_normal, predict_online
from tests.bench.schedule import context_sum, seconds
from tests.bench.scheduling import refill


def step(lengths, prompts, means=None):
    means = np.full(len(lengths), np.nan) if means is None else np.array(means)
    return Step(np.array(lengths), np.array(prompts), means)


def test_contexts_and_seconds_by_hand():
    two = step([3, 1, 2], [10, 20, 30])
    starts = refill(two.lengths_B, queue(two.lengths_B, "fifo"), 2)
    assert starts.tolist() == [0, 0, 1]
    assert context_sum(two, starts).tolist() == [10 + 20, 11 + 30, 12 + 31]
    assert seconds(two, starts, lambda rows, context: 1000 * rows * context) == 30 + 41 + 43


def test_contexts_are_those_of_decoding_token_by_token():
    for drawn in log_normal(3, seed=1):
        short = step(drawn.lengths_B % 50 + 1, np.arange(32))
        starts = refill(short.lengths_B, queue(short.lengths_B, "lpt"), 5)
        ends = starts + short.lengths_B
        expected = [
            sum(
                short.prompt_tokens_B[b] + t - starts[b]
                for b in range(32)
                if starts[b] <= t < ends[b]
            )
            for t in range(ends.max())
        ]
        assert context_sum(short, starts).tolist() == expected


def test_predictions_come_from_earlier_steps_only_and_follow_what_is_known():
    rng = np.random.default_rng(0)
    means = rng.uniform(50, 500, (20, 8))
    steps = [step(np.ceil(m * rng.uniform(0.9, 1.1, 8)).astype(int), [30] * 8, m) for m in means]
    found = predict_online(steps)
    assert np.ptp(found[0][0]) == 0  # nothing is known yet
    last = found[-1][0]
    assert np.corrcoef(last, steps[-1].lengths_B)[0, 1] > 0.95
    assert last == pytest.approx(steps[-1].lengths_B, rel=0.35)
    changed = predict_online([*steps[:-1], step([1] * 8, [30] * 8, means[-1])])
    assert (changed[-1][0] == last).all()


def test_rollouts_of_one_prompt_cannot_be_told_apart_before_they_begin():
    found = predict_online(log_normal(5, seed=0))
    assert all(np.ptp(predicted[0]) == 0 for predicted in found)
