"""The engine `hf`: its log-probabilities compared with float32 on the CPU, and its tokens per
second by rows in flight."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tasks.engines.engine import Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tests.gpu.check.shapes import Sizes, make_model, timed

PROMPTS = [[20 + i % 60, 14, 20, 3, 32] for i in range(64)]
GROUP = 4


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    exact = make_model("tiny", torch.float32, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("tiny", torch.float32, torch.device("cpu")).to(sizes.device, dtype)
        samples = draw(model, 8, GROUP, 16)
        gaps = torch.cat(list(differences(exact, samples)))
        yield {
            "log-probabilities": f"{dtype} against float32 on the CPU",
            "mean gap": float(gaps.mean()),
            "largest gap": float(gaps.max()),
        }
    for shape in sizes.shapes:
        model = make_model(shape, torch.bfloat16, sizes.device)
        draw(model, 2, 2, sizes.new_tokens)  # compiles, allocates
        for num_rows in sizes.rows:
            work = partial(draw, model, max(num_rows // 8, 1), 8, sizes.new_tokens, num_rows)
            seconds, samples = timed(work, sizes.device)
            tokens = sum(map(len, samples.token_ids))
            yield {"model": shape, "rows": num_rows, "tokens/s": tokens / seconds, "tokens": tokens}


def draw(
    model: Any, num_prompts: int, group_size: int, new_tokens: int, max_rows: int = 64
) -> Samples:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num_prompts)]
    total, sampling = num_prompts * group_size, Sampling(1.0, 1.0, 0, new_tokens, 0)
    engine = HfEngine(model, [1], max_rows, 4096)
    return engine.generate(Request(prompts, [group_size] * num_prompts, range(total), sampling))


@torch.no_grad()
def differences(exact: Any, samples: Samples) -> Iterator[torch.Tensor]:
    """Yield the |difference| of every completion's log-probabilities to a float32 model's."""
    for row, completion in enumerate(samples.token_ids):
        tokens = [*PROMPTS[row // GROUP], *completion]
        logits_TV = exact(torch.tensor([tokens])).logits[0, -len(completion) - 1 : -1]
        every_TV = logits_TV.log_softmax(-1)
        exact_T = every_TV[torch.arange(len(completion)), torch.tensor(completion)]
        yield (exact_T - torch.tensor(samples.logprobs[row])).abs()
