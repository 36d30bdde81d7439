"""Rewards from `winnow grade`: `compute_score` for verl, `winnow` for TRL, `areal` for AReaL.

The service is at WINNOW_GRADER (http://127.0.0.1:8008), and its token is WINNOW_TOKEN. A completion
that could not be graded has no reward: TRL gets None; elsewhere the call fails."""

import json
import os
import urllib.request


def grade(pairs):
    """Return the rewards of pairs (completion, ground truth); None for one without a verdict."""
    address = os.environ.get("WINNOW_GRADER", "http://127.0.0.1:8008") + "/grade"
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("WINNOW_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    body = json.dumps([{"completion": text, "label": truth} for text, truth in pairs]).encode()
    request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return [verdict["reward"] for verdict in json.load(response)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    (reward,) = grade([(solution_str, ground_truth)])
    if reward is None:
        raise RuntimeError("the completion could not be graded; `winnow grade` logged the reason")
    return reward


def winnow(completions, ground_truth, log_extra=None, **_):
    if log_extra:  # TRL then dumps it with the completions, and `winnow import` finds the prompt
        log_extra("ground_truth", list(ground_truth))
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return grade(list(zip(texts, ground_truth, strict=True)))


def areal(prompt, completions, prompt_ids, completion_ids, answer, **_):
    return compute_score("winnow", completions, answer)
