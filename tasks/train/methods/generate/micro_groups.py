"""`micro_groups`: groups of any size under a budget of key-value memory, after Infinite Sampling
(arXiv 2506.22950).

Only as many rollouts are in flight as `cache_megabytes` holds; they share one reading of their
prompt, and a finished one's slot goes to the next at once. With the slots fixed, the time is that
of the longest schedule, so rollouts expected to be long start first (`order: lpt`); `sjf` (short
first) is the paper's, and worse except for streaming; `fifo` is what continuous batching does
anyway. Lengths are predicted by a ridge regression on the prompt's length and the mean length of
its earlier rollouts, fitted to the latest ones. A prediction decides the order only: every rollout
is finished, and is the same sample in any order. For the engine `hf`: vLLM schedules by itself,
within the memory it is given. Left out: predicting again from the tokens so far, which in
continuous slots could only change what was started already."""

from typing import Literal

import numpy as np
from sklearn.linear_model import Ridge

from tasks.common.params import ParamsError
from tasks.engines.engine import Engine, Request, Samples, ScheduledEngine
from tasks.train.rollouts import Draw, Floats, Ints, Rollouts, State

Order = Literal["fifo", "sjf", "lpt"]

HISTORY = 2048  # rollouts that predictions are fitted to
FEWEST = 64  # before that all are expected to be equally long
# rollouts of its own after which a prompt's mean length counts as much as all prompts' together
TRUST = 4.0
ORDERS: tuple[Order, ...] = ("fifo", "lpt", "sjf")


def start(num_prompts: int, *, cache_megabytes: float, order: Order) -> State:
    """The budget, the order, each prompt's rollouts and their tokens so far, and the latest
    rollouts' features."""
    return {
        "cache_bytes": np.array(cache_megabytes * 2**20),
        "order": np.array(ORDERS.index(order)),
        "seen": np.zeros((2, num_prompts)),
        "history": np.zeros((0, 3)),  # prompt tokens, mean length expected of the prompt, length
    }


def generate(state: State, engine: Engine, draw: Draw) -> Samples:
    """`draw.counts[q]` completions of `draw.prompts[q]`, each with its own seed, within the
    budget."""
    if not isinstance(engine, ScheduledEngine):
        raise ParamsError(
            f"train.generate.method micro_groups is for engine.name hf; {engine.name} batches "
            "continuously by itself: "
            "set the method to batched, and its memory by engine.memory_fraction"
        )
    longest = max(map(len, draw.prompts), default=0)
    of_row, of_prompt = (
        engine.cache_bytes(longest + draw.sampling.max_tokens),
        engine.cache_bytes(longest),
    )
    num_slots = int(float(state["cache_bytes"]) // (of_row + of_prompt))
    if num_slots < 1:
        raise ParamsError(
            f"train.generate.cache_megabytes is {float(state['cache_bytes']) / 2**20:g}, and one "
            "rollout may take "
            f"{(of_row + of_prompt) / 2**20:.3g}: raise it, or lower sampling.max_tokens"
        )
    owners = np.repeat(np.arange(len(draw.prompts)), draw.counts)
    order = start_order(predict(state, draw), owners, ORDERS[int(state["order"])])
    request = Request(draw.prompts, draw.counts, draw.seeds, draw.sampling)
    return engine.generate_in_order(request, order, num_slots)


def start_order(lengths_Q: Floats, owners_B: Ints, order: Order) -> Ints:
    """The rows in the order they start; rows of a prompt, for which the same is predicted, stay
    together."""
    return queue(lengths_Q[owners_B], order)


def queue(lengths_B: Floats, order: Order) -> Ints:
    """The rollouts as they came, the shortest first, or the longest processing time first; equal
    ones as they came."""
    if order == "fifo":
        return np.arange(len(lengths_B))
    return np.argsort(lengths_B if order == "sjf" else -lengths_B, kind="stable")


def predict(state: State, draw: Draw) -> Floats:
    """[Q] the tokens that a rollout of each prompt is expected to take; all alike while too little
    is known."""
    history = state["history"]
    if len(history) < FEWEST:
        return np.zeros(len(draw.prompts))
    rows = (
        np.zeros(len(draw.prompts), dtype=np.int64)
        if draw.prompt_rows is None
        else np.array(draw.prompt_rows)
    )
    tokens, num = state["seen"][:, rows] * (
        draw.prompt_rows is not None
    )  # other prompts were never seen
    features = np.column_stack(
        [[len(ids) for ids in draw.prompts], expected_mean(tokens, num, history[:, 2].mean())]
    )
    return np.asarray(
        Ridge(alpha=1.0).fit(history[:, :2], history[:, 2]).predict(features), dtype=np.float64
    )


def expected_mean(tokens_Q: Floats, num_Q: Floats, mean: float) -> Floats:
    """[Q] mean length of a prompt's own rollouts, drawn towards the mean of all where there are
    few."""
    return np.asarray((tokens_Q + TRUST * mean) / (num_Q + TRUST))


def observe(state: State, rollouts: Rollouts) -> None:
    """Learn from the step's lengths."""
    lengths, rows = (
        rollouts.completion_tokens_B().astype(np.float64),
        rollouts.prompt_rows_Q[rollouts.group_B],
    )
    before, mean = (
        state["seen"],
        state["history"][:, 2].mean() if len(state["history"]) else lengths.mean(),
    )
    expected = expected_mean(before[0, rows], before[1, rows], mean)
    new = np.column_stack([rollouts.prompt_tokens_B(), expected, lengths])
    state["history"] = np.concatenate([state["history"], new])[-HISTORY:]
    seen = before.copy()
    np.add.at(seen[0], rows, lengths)
    np.add.at(seen[1], rows, 1.0)
    state["seen"] = seen
