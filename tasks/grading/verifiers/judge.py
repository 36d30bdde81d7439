"""`judge`: a language model behind an OpenAI-compatible server decides whether the answer is right.

Off unless a source names it: a verdict costs money, can be wrong, and can be manipulated. Settings:

- `url` of the server (`http://127.0.0.1:8000/v1`), `model`, `key_variable` (the environment
  variable with the API key, or null);
- `template`, the question to the judge with `{completion}` and `{gold}`, inserted verbatim;
- `right` and `wrong`: the last of these words in the reply is the vote;
- `votes` per verdict (the majority decides), `temperature`, `max_tokens` per reply;
- `parameters` of the model in billions, for the ledger: 2 P FLOPs per token, like any forward pass;
- `seconds` to wait for a reply, `concurrency` of requests.

The processes in which other verifiers run send no requests. The stage itself sends them
(`tasks.grading.judge`), so a judge cannot be part of a `composite` or a `part`. The stage stores
every verdict but `error`, by settings, completion and gold. Not tested on real cases."""

from dataclasses import dataclass

from tasks.grading.verdict import Verdict

ALONE = True
canonical_completion = None  # golds are not judged


@dataclass(frozen=True)
class Settings:
    url: str
    model: str
    key_variable: str | None
    template: str
    right: str
    wrong: str
    votes: int
    temperature: float
    max_tokens: int
    parameters: float
    seconds: float
    concurrency: int


def verify(completion: str, answer: str, settings: Settings) -> Verdict:
    """Return an `error`: verifier processes send no requests. An empty completion is `unparsed`."""
    if not completion.strip():
        return Verdict("unparsed", "")
    return Verdict("error", "a judge cannot be part of another verifier: name it in the source")
