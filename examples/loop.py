"""GRPO with sGPO group sizes, in one page, on Winnow's own parts: an engine, a grader, a learner.

    python examples/loop.py [--steps 20] [--threads 2]

Profile every prompt once, drop prompts that are always or never solved, and size each group by its
pass rate (sGPO). Then sample, grade, estimate and update. The embedded policy learns sums.

`winnow run` adds the recipe's other slots (choice of the next prompts, replay, selection), stored
and reused samples, checkpoints, cost accounts, sampling during the update, and several processes.
`tasks/train/loop/loop.py` is the same loop with all of these."""

import argparse

import numpy as np
import reasoning_gym
import torch
from tqdm import tqdm

from tasks.engines.engine import Engine, Request, sample_seed
from tasks.engines.loading import load_engine
from tasks.engines.settings import EngineSettings, Sampling
from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.models.policy import load_model, load_tokenizer, read_policy, torch_device
from tasks.models.prompts import decode
from tasks.policy.source import EMBEDDED
from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.learner.learner import Learner
from tasks.train.learner.ranks import Ranks
from tasks.train.methods.advantage import grpo
from tasks.train.methods.loss import clip
from tasks.train.settings import LearnerSettings, TrainSettings

SAMPLING = Sampling(max_tokens=64)
NUM_TRAIN, NUM_TEST = 128, 128
NUM_PROFILED = 8  # samples of every prompt in the profile
NUM_PROMPTS = 8  # groups per step
LEARNING_RATE = 3e-4


class Loop:
    """The policy with its engine, its grader and the problems."""

    def __init__(self, engine: Engine, grader: Grader, learner: Learner) -> None:
        self.engine, self.grader, self.learner = engine, grader, learner
        self.tokenizer = load_tokenizer(learner.policy.folder)
        config = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 2}
        size = 2 * (NUM_TRAIN + NUM_TEST)
        made = reasoning_gym.create_dataset("chain_sum", seed=1, size=size, **config)
        distinct = {problem["question"]: problem["answer"] for problem in made}
        self.problems = [*distinct.items()][: NUM_TRAIN + NUM_TEST]  # small ones repeat
        self.prompts = [self.tokenizer(question).input_ids for question, _ in self.problems]

    def rollouts(self, rows: Ints, counts: Ints, seed: str) -> Rollouts:
        """Return `counts[q]` graded rollouts of the problem in `rows[q]`, by the current policy."""
        # sample
        prompts = [self.prompts[row] for row in rows]
        seeds = [sample_seed(seed, number) for number in range(int(counts.sum()))]
        request = Request(prompts, counts.tolist(), seeds, SAMPLING)
        samples = self.engine.generate(request)

        # grade
        texts = decode(samples.token_ids, samples.finish_reasons, self.tokenizer)
        asked = [self.problems[row] for row in np.repeat(rows, counts)]
        verdicts = self.grader.grade(
            [
                Answer("numeric", text, gold, reason == "length", question)
                for (question, gold), text, reason in zip(
                    asked, texts, samples.finish_reasons, strict=True
                )
            ]
        )
        return make_rollouts(
            rows,
            prompts,
            request.owner_B(),
            token_ids=samples.token_ids,
            logprobs=samples.logprobs,
            versions=[[self.learner.version] * len(ids) for ids in samples.token_ids],
            reason=samples.finish_reasons,
            outcome=[verdict.outcome for verdict in verdicts],
            reward=[verdict.reward for verdict in verdicts],
        )

    def pass_rates(self, rows: Ints, num_samples: int, seed: str) -> "np.ndarray":
        """Return the share of correct rollouts of each problem."""
        found = self.rollouts(rows, np.full(len(rows), num_samples), seed)
        return np.bincount(found.group_B, found.is_correct_B()) / num_samples

    def learn(self, found: Rollouts) -> float:
        """Update the policy on these rollouts, and return their mean reward."""
        advantages_B = grpo.advantage(found.rewards_B, found.group_B)
        keep_B = ~found.is_error_B()
        found = found.estimated(keep_B, advantages_B[found.owner_N()])
        loss = clip.Method(clip.Settings())
        if found.has_advantage_B().any():
            self.learner.compute_gradient(found, loss)
            self.learner.step(LEARNING_RATE)
            self.engine.set_weights(self.learner.weights())
        return float(found.rewards_B.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = read_policy(EMBEDDED)
    device = torch_device("auto")
    model = load_model(policy.folder, dtype=torch.float32, device=device)
    engine = load_engine(EngineSettings(name="hf"), policy, model)
    learner = Learner(
        policy=policy,
        model=model,
        settings=TrainSettings(),
        memory=LearnerSettings(),
        sampling=SAMPLING,
        ranks=Ranks(0, 1),
        device=device,
    )
    with Grader(Verify()) as grader:
        loop = Loop(engine, grader, learner)
        train, test = np.split(np.arange(NUM_TRAIN + NUM_TEST), [NUM_TRAIN])
        before = loop.pass_rates(test, 4, "test")

        # profile once, drop prompts without a signal, size groups by the inverse of the pass rate
        rates = loop.pass_rates(train, NUM_PROFILED, "profile")
        kept = (rates > 0.0) & (rates < 1.0)
        rows, sizes = train[kept], np.clip(np.ceil(2.0 / rates[kept]), 4, 16).astype(np.int64)
        print(f"{kept.sum()} of {len(rates)} prompts are solved sometimes")

        # from easy to hard, then from the start again
        order = np.argsort(-rates[kept], kind="stable")
        bar = tqdm(range(options.steps), "train", unit="step")
        for step in bar:
            places = range(step * NUM_PROMPTS, (step + 1) * NUM_PROMPTS)
            visits = np.take(order, places, mode="wrap")
            reward = loop.learn(loop.rollouts(rows[visits], sizes[visits], f"step {step}"))
            bar.set_postfix_str(f"reward {reward:.2f}")

        after = loop.pass_rates(test, 4, "test")
        print(f"test accuracy {before.mean():.3f} -> {after.mean():.3f}")


if __name__ == "__main__":
    main()
