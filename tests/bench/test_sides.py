"""Test the comparison with TRL: Winnow's side runs, and its policies are evaluated. TRL itself is
not installed here."""

import pytest
import reasoning_gym

from tasks.common.artifacts import PROMPTS, Layout
from tasks.grading.loading import load
from tasks.models.policy import load_tokenizer
from tests.bench.against_trl import accuracy, run_side, speeds
from tests.bench.world import make_large, make_world, parameters, place_embedded


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_winnows_side_of_the_comparison(tmp_path):
    layout = make_world(tmp_path, steps=4, rollouts=16, seeds=2)
    validation = PROMPTS.read(layout.prompts("validation"))
    PROMPTS.write(layout.prompts("validation"), validation.head(32))
    report = run_side("winnow", tmp_path, steps=4, seed=1, points=[1, 4], learning_rate=1e-3)
    assert (len(report["wall"]), len(report["completion_tokens"])) == (5, 4)
    assert [point["step"] for point in report["points"]] == [1, 4]
    assert all(rate > 0 for rate in list(speeds(report, 1, 16).values())[:4])
    assert 0 < accuracy(tmp_path, tmp_path / "winnow-1-0.001-4") < 1


def test_large_policy_has_long_prompts_and_rewards_by_chance(tmp_path):
    values, layout = parameters(rollouts=32, large=True), Layout(tmp_path)
    (task,) = values["ingest"]["sources"][0]["settings"]["tasks"]
    place_embedded(layout)
    make_large(layout)
    tokenizer = load_tokenizer(layout.policy)
    problems = reasoning_gym.create_dataset("chain_sum", size=64, seed=0, **task["config"])
    assert {len(tokenizer(problem["question"]).input_ids) for problem in problems} == {109}
    verifier = load(task["verifier"], values["verify"]["verifiers"])
    characters = filter(str.strip, tokenizer.convert_ids_to_tokens(range(3, 97)))
    outcomes = [verifier.verify(f"?{last}", "1").outcome for last in characters]
    assert 0.4 < outcomes.count("correct") / len(outcomes) < 0.6
