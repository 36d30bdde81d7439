"""`multi_turn`: the policy and an environment write turns alternately; a rollout is the whole
conversation.

The first turns are sampled like completions, with one prefill of a group's prompt. The
environment's tokens join the context and are never trained on (`is_action`), but a later turn is
conditioned on them. A turn ends with the policy's stop token. The conversation ends if the
environment has no reply or an empty one, after `max_turns`, if a turn is cut at `max_turn_tokens`,
or if the next turn might not fit `sampling.max_tokens`, the limit of the whole conversation.

Profile and evaluation use single turns. Left out: environments on other machines, and sampling in
some conversations while others still wait for their environment.

Legend: B rollouts."""

from dataclasses import dataclass, field, replace
from typing import Any

from tasks.common.params import ParamsError, at_least, settings
from tasks.engines.engine import Engine, Request, Samples, sample_seed
from tasks.train.environments.environment import Episode, load_environment
from tasks.train.slots import Generate, Requested


@settings
class Settings:
    environment: dict[str, Any]  # `name`, a file of tasks/train/environments, and its settings
    max_turns: int  # maximum number of the policy's turns in a conversation
    max_turn_tokens: int  # maximum number of tokens in a turn

    def __post_init__(self) -> None:
        at_least(1, train__generate__max_turns=self.max_turns)
        at_least(1, train__generate__max_turn_tokens=self.max_turn_tokens)


EXAMPLE = Settings(
    environment={"name": "higher_lower", "higher": "+", "lower": "-", "no_number": "?"},
    max_turns=2,
    max_turn_tokens=2,
)


@dataclass
class Conversation:
    """One rollout so far: its prompt, `messages` (whether the prompt is a chat), its tokens, and
    `is_action` (whether the policy wrote each token)."""

    prompt: list[int]
    messages: bool
    seed: int
    episode: Episode
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    finish_reason: str = "stop"

    def context(self) -> list[int]:
        return self.prompt + self.token_ids

    def take(self, token_ids: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Append the policy's next turn."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.is_action += [True] * len(token_ids)
        self.finish_reason = finish_reason

    def answer(self, token_ids: list[int]) -> None:
        """Append the environment's reply as tokens."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.is_action += [False] * len(token_ids)


class Method(Generate):
    def __init__(self, settings: Settings, num_prompts: int) -> None:
        self.settings = settings
        self.environment = load_environment(settings.environment)

    def generate(self, engine: Engine, request: Request, requested: Requested) -> Samples:
        """Return the conversations for `request`. Raise ParamsError if not even one turn fits
        `sampling.max_tokens`."""
        limit = request.sampling.max_tokens
        if self.settings.max_turn_tokens > limit:
            raise ParamsError(
                f"train.generate.max_turn_tokens is {self.settings.max_turn_tokens}, but the whole "
                f"conversation is limited to sampling.max_tokens {limit}: lower the first or raise "
                "the second"
            )
        sampling = replace(request.sampling, max_tokens=self.settings.max_turn_tokens)
        every = self.begin(request, requested)
        open_ones, turn = every, replace(request, sampling=sampling)
        for number in range(self.settings.max_turns):
            self.play(engine, turn, open_ones)
            is_last = number + 1 == self.settings.max_turns
            open_ones = [] if is_last else self.answer(open_ones, limit, requested)
            if not open_ones:
                break
            turn = Request(
                [one.context() for one in open_ones],
                [1] * len(open_ones),
                [sample_seed("turn", one.seed, number) for one in open_ones],
                sampling,
                request.with_logprobs,
            )
        return Samples(
            [one.token_ids for one in every],
            [one.logprobs for one in every],
            [one.finish_reason for one in every],
            [one.is_action for one in every],
        )

    def begin(self, request: Request, requested: Requested) -> list[Conversation]:
        """Return a new conversation for every rollout."""
        # imported here: transformers takes seconds, and reading the settings does not need it
        from tasks.models.prompts import messages_of

        rows = requested.prompts.select("answer", "prompt", "messages", "template").rows()
        conversations = []
        for owner, seed in zip(request.owner_B().tolist(), request.seeds, strict=True):
            answer, *prompt = rows[owner]
            is_chat = messages_of(prompt, requested.tokenizer) is not None
            episode = self.environment.start(prompt[0], answer)
            conversations.append(Conversation(list(request.prompts[owner]), is_chat, seed, episode))
        return conversations

    def play(self, engine: Engine, turn: Request, conversations: list[Conversation]) -> None:
        """Sample the next turn of these conversations."""
        samples = engine.generate(turn)
        rows = zip(
            conversations,
            samples.token_ids,
            samples.logprobs,
            samples.finish_reasons,
            strict=True,
        )
        for one, token_ids, logprobs, reason in rows:
            one.take(token_ids, logprobs, reason)

    def answer(
        self, conversations: list[Conversation], limit: int, requested: Requested
    ) -> list[Conversation]:
        """Append the environment's replies, and return the conversations that continue."""
        from tasks.models.prompts import decode, render_reply  # transformers takes seconds to load

        continuing = []
        for one in conversations:
            if one.finish_reason != "stop":
                continue
            others = [place for place, is_own in enumerate(one.is_action) if not is_own]
            turn = one.token_ids[others[-1] + 1 if others else 0 :]  # the policy's last
            (text,) = decode([turn], [one.finish_reason], requested.tokenizer)
            reply = one.episode.reply(text)
            if not reply:
                continue
            token_ids = render_reply(
                reply, requested.tokenizer, requested.stop_ids, is_chat=one.messages
            )
            num_tokens = len(one.token_ids) + len(token_ids) + self.settings.max_turn_tokens
            if not token_ids or num_tokens > limit:
                continue
            one.answer(token_ids)
            continuing.append(one)
        return continuing
