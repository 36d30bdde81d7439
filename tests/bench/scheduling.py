"""When each rollout decodes if only `num_slots` fit into memory at once (Infinite Sampling, arXiv
2506.22950).

Rollout b decodes `lengths_B[b]` steps without a pause, and every step decodes one token in each
occupied slot. A schedule is `starts_B`, the step at which each rollout begins; the work is done
after its makespan. Lengths are not known before the end: an order comes from predictions, and then
only ranks matter. A schedule never drops or shortens a rollout, else rewards would favour the
short. Continuous batching, as vLLM does it, is `refill` in the order of arrival; `lpt` has at most
4/3 - 1/(3g) times the best makespan; `sjf` ends the first rollouts soonest, and all of them no
sooner than sorted rounds. Left out: pausing a rollout, and slots that grow and shrink with free
memory."""

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.train.methods.generate.micro_groups import queue
from tasks.train.rollouts import Ints

Lengths = npt.NDArray[Any]  # steps, whole numbers; predictions may be fractions

MAX_BALANCED_SLOTS = 3  # the states of `balance` grow with (rollouts / epsilon)^(slots - 1)


def refill(lengths_B: Lengths, queue_B: Ints, num_slots: int) -> Lengths:
    """[B] starts when a slot that falls free takes the next rollout of the queue at once."""
    free = [(0, slot) for slot in range(at_least_one(num_slots))]
    starts_B = np.zeros_like(lengths_B)
    for row in queue_B:
        start, slot = free[0]
        starts_B[row] = start
        heapq.heapreplace(free, (start + lengths_B[row], slot))
    return starts_B


def rounds(lengths_B: Lengths, queue_B: Ints, num_slots: int) -> Lengths:
    """[B] starts when the queue is cut into micro groups of `num_slots` and each waits for the one
    before to end. From the longest to the shortest no other cut is faster."""
    starts_B, start = np.zeros_like(lengths_B), 0
    for first in range(0, len(queue_B), at_least_one(num_slots)):
        rows = queue_B[first : first + num_slots]
        starts_B[rows] = start
        start += lengths_B[rows].max()
    return starts_B


def in_slots(lengths_B: Lengths, slot_B: Ints) -> Lengths:
    """[B] starts when each slot decodes its own rollouts one after another, as they came."""
    starts_B = np.zeros_like(lengths_B)
    for slot in np.unique(slot_B):
        rows = np.flatnonzero(slot_B == slot)
        starts_B[rows[1:]] = np.cumsum(lengths_B[rows])[:-1]
    return starts_B


def makespan(lengths_B: Lengths, starts_B: Lengths) -> Any:
    """Steps until the last rollout has ended."""
    return (starts_B + lengths_B).max(initial=0)


def lower_bound(lengths_B: Ints, num_slots: int) -> int:
    """Steps that no schedule can do without: the longest rollout, or full slots throughout."""
    return max(int(lengths_B.max(initial=0)), -(-int(lengths_B.sum()) // at_least_one(num_slots)))


def occupied(lengths_B: Ints, starts_B: Ints) -> Ints:
    """[steps] how many rollouts decode in each step."""
    steps = int(makespan(lengths_B, starts_B)) + 1
    begun, ended = (np.bincount(at, minlength=steps) for at in (starts_B, starts_B + lengths_B))
    return np.asarray(np.cumsum(begun - ended)[:-1], dtype=np.int64)


def balance(lengths_B: Lengths, num_slots: int, epsilon: float) -> Ints:
    """[B] a slot for each rollout, so that the fullest holds at most 1 + epsilon times the least
    possible (an FPTAS).

    Rollout by rollout, longest first, all distributions of load over the slots are extended, and of
    those that agree up to epsilon x longest / B one is kept; what is no better than LPT's is
    dropped, so the result is never worse. Raises ValueError for more than 3 slots, where there are
    too many of them."""
    if at_least_one(num_slots) > MAX_BALANCED_SLOTS or epsilon <= 0:
        raise ValueError(
            f"{num_slots} slots, epsilon {epsilon}: balance takes 1 to 3 slots and an epsilon "
            "above 0"
        )
    order = queue(lengths_B, "lpt")
    starts_B = refill(lengths_B, order, num_slots)
    limit = makespan(lengths_B, starts_B)
    grain = epsilon * lengths_B.max(initial=0) / max(len(lengths_B), 1)
    loads, history = np.zeros((1, num_slots), dtype=lengths_B.dtype), []
    for length in lengths_B[order]:
        loads, parents, places = extend(loads, length, limit, grain)
        history.append((parents, places))
    if len(loads) == 0:  # nothing beats LPT; a slot's rollouts are those that follow each other
        return slots_of(lengths_B, order, num_slots, None)
    best, chosen = int(np.argmin(loads.max(axis=1))), []
    for parents, places in reversed(history):
        chosen.append(int(places[best]))
        best = int(parents[best])
    return slots_of(lengths_B, order, num_slots, chosen[::-1])


def extend(loads: Lengths, length: Any, limit: Any, grain: float) -> tuple[Lengths, Ints, Ints]:
    """The distributions [S, slots], each sorted, that putting a rollout of `length` into any slot
    leads to, below `limit` and one of those alike up to `grain`; with each the distribution that it
    came from, and the place there."""
    num, num_slots = loads.shape
    longer = np.repeat(loads[None], num_slots, axis=0)  # [place, S, slots]
    longer[range(num_slots), :, range(num_slots)] += length
    flat = np.sort(longer.reshape(-1, num_slots), axis=1)
    below = np.flatnonzero(flat[:, -1] < limit)
    cells = (flat[below] // max(grain, 1e-12)).astype(np.int64)
    shape = [int(cells.max(initial=0)) + 1] * num_slots
    _, first = np.unique(np.ravel_multi_index(tuple(cells.T), shape), return_index=True)
    kept = below[first]
    return flat[kept], kept % num, kept // num


def slots_of(lengths_B: Lengths, order: Ints, num_slots: int, places: list[int] | None) -> Ints:
    """[B] slots when each rollout goes into the slot at its place, counted from the emptiest; the
    emptiest without."""
    loads, slot_B = np.zeros(num_slots), np.zeros(len(lengths_B), dtype=np.int64)
    for row, place in zip(order, places or [0] * len(order), strict=True):
        slot_B[row] = np.argsort(loads, kind="stable")[place]
        loads[slot_B[row]] += lengths_B[row]
    return slot_B


def at_least_one(num_slots: int) -> int:
    """`num_slots`; ValueError when there is none."""
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}: decoding needs at least 1")
    return num_slots
