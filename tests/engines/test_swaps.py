"""New weights in the middle of completions: each token's log-probability is that of the weights
which the server says wrote it."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transformers import PreTrainedModel

from tasks.engines.engine import OnEnded, Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import SETTINGS, logprob_gaps, scaled
from tests.patience import PATIENCE

SAMPLING = Sampling(temperature=0.9, top_p=1.0, top_k=0, max_tokens=300, seed=0)
PROMPTS = [[20 + i, 14, 20, 3, 32] for i in range(4)]
REQUEST = Request(PROMPTS, [4] * 4, list(range(16)), SAMPLING)
FACTORS = (1.0, 1.3, 1.7)  # of all weights, in three versions


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[ServerEngine]:
    engine = load_engine(dataclasses.replace(SETTINGS, num_replicas=1), policy)
    assert isinstance(engine, ServerEngine)
    yield engine
    engine.close()


def in_the_middle(change: Callable[[], None]) -> OnEnded:
    """What `generate` calls when a completion has ended: the first time it starts `change`."""
    began = threading.Event()

    def call(*_: object) -> None:
        if not began.is_set():
            began.set()
            threading.Thread(target=change).start()

    return call


def largest_gap(samples: Samples, models: dict[int, PreTrainedModel]) -> float:
    """The largest |difference| of a token's log-probability to that of its policy, given all before
    it."""
    assert samples.versions is not None
    versions_N = np.concatenate(samples.versions)
    gaps_N = {
        version: np.concatenate(logprob_gaps(model, REQUEST, samples))
        for version, model in models.items()
    }
    return max(float(gaps[versions_N == version].max()) for version, gaps in gaps_N.items())


def swapped_twice(
    engine: ServerEngine, models: list[PreTrainedModel], versions: tuple[int, int, int]
) -> Samples:
    """Completions that begin with the first policy, while the two others take its place."""
    engine.set_weights(NamedWeights(models[0]), versions[0])
    done = threading.Event()

    def swap() -> None:
        for version, model in zip(versions[1:], models[1:], strict=True):
            engine.swap_weights(NamedWeights(model), version)
            time.sleep(0.3)
        done.set()

    samples = engine.generate(REQUEST, in_the_middle(swap))
    assert done.wait(PATIENCE)
    return samples


@pytest.mark.vllm
@pytest.mark.slow
def test_tokens_are_of_the_policy_that_they_are_said_to_be_of(
    engine: ServerEngine, policy: Policy
) -> None:
    """On a busy machine completions may end before the second swap: then others are sampled."""
    scaled_models = [scaled(policy, factor) for factor in FACTORS]
    for first in range(0, 100, 10):
        versions = (first, first + 5, first + 6)
        samples = swapped_twice(engine, scaled_models, versions)
        assert samples.versions is not None
        found = set(itertools.chain(*samples.versions))
        if len(found) == 3:
            break
    assert found == set(versions)
    models = dict(zip(versions, scaled_models, strict=True))
    assert any(len(set(versions)) == 3 for versions in samples.versions)
    assert all(versions == sorted(versions) for versions in samples.versions)
    assert largest_gap(samples, models) < 1e-4
    assert max(gaps.max() for gaps in logprob_gaps(scaled_models[0], REQUEST, samples)) > 0.1
    # and from then on all is of the last
    again = engine.generate(REQUEST)
    assert again.versions is not None
    assert set(itertools.chain(*again.versions)) == {versions[-1]}
