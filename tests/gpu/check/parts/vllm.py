"""vLLM in this process, if it is installed: its log-probabilities compared with float32 on the CPU,
seeds, new weights in place, the memory that sleep frees, and its tokens per second compared with
vLLM's own `LLM.generate` without Winnow."""

import dataclasses
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.settings import Sampling
from tasks.models.policy import read_policy
from tasks.models.weights import NamedWeights
from tests.gpu.check.parts.engine import GROUP, PROMPTS, differences
from tests.gpu.check.shapes import Sizes, make_model, seconds_of, timed
from tests.policies import ENGINE, character_tokenizer, place_policy


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        yield {"vllm": "is not installed"}
        return
    dtypes = ["float32"] if sizes.is_small else ["float32", "bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in dtypes:
            engine = start(Path(folder) / dtype, "tiny", dtype, sizes)
            yield from parity(engine, dtype)
            if sizes.is_small:
                yield from rates(engine, "tiny", sizes)
            del engine
        for shape in [] if sizes.is_small else sizes.shapes:
            engine = start(Path(folder) / shape, shape, "bfloat16", sizes)
            yield from rates(engine, shape, sizes)
            yield from sleeping(engine, shape)
            del engine


def start(root: Path, shape: str, dtype: str, sizes: Sizes) -> Any:
    """Return the engine for training, with random weights."""
    layout, source = Layout(root), root / "source"
    model = make_model(shape, torch.float32, torch.device("cpu"))
    model.save_pretrained(source)
    character_tokenizer().save_pretrained(source)
    place_policy(source, layout, model)
    settings = dataclasses.replace(
        ENGINE,
        name="vllm",
        dtype=dtype,
        device=sizes.device.type,
        max_rows=max(sizes.rows),
        sleep=True,
    )
    return load_engine(settings, read_policy(layout), model)


def parity(engine: Any, dtype: str) -> Iterator[dict[str, Any]]:
    """Compare log-probabilities of the initial and of new weights, and check seeds."""
    model = make_model("tiny", torch.float32, torch.device("cpu"))
    first = draw(engine, range(32))
    yield {"dtype": dtype, "weights": "initial", **gaps(model, first)}
    again = draw(engine, range(32))
    backwards = draw(engine, range(31, -1, -1))
    yield {
        "dtype": dtype,
        "same completions, called again": again.token_ids == first.token_ids,
        "with other seeds": backwards.token_ids == first.token_ids,
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    seconds = seconds_of(lambda: engine.set_weights(NamedWeights(model)), torch.device("cpu"))
    yield {
        "dtype": dtype,
        "weights": f"replaced in {seconds:.3g} s",
        **gaps(model, draw(engine, range(32))),
    }


def draw(engine: Any, seeds: Sequence[int], new_tokens: int = 16) -> Samples:
    """Return completions of the first prompts, GROUP of each."""
    num = len(seeds) // GROUP
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num)]
    sampling = Sampling(1.0, 1.0, 0, new_tokens, 0)
    samples: Samples = engine.generate(Request(prompts, [GROUP] * num, list(seeds), sampling))
    return samples


def gaps(exact: Any, samples: Samples) -> dict[str, float]:
    """Compare the engine's log-probabilities with those of a float32 model on the CPU."""
    every = torch.cat(list(differences(exact, samples)))
    return {"mean gap": float(every.mean()), "largest gap": float(every.max())}


def rates(engine: Any, shape: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Measure tokens per second of Winnow, and of vLLM's own call with a request per prompt."""
    for num_rows in sizes.rows:
        draw(engine, range(GROUP), sizes.new_tokens)
        work = partial(draw, engine, range(num_rows), sizes.new_tokens)
        seconds, samples = timed(work, sizes.device)
        rate = sum(map(len, samples.token_ids)) / seconds
        work = partial(generate_bare, engine, num_rows, sizes.new_tokens)
        seconds, bare_tokens = timed(work, sizes.device)
        bare_rate = bare_tokens / seconds
        yield {
            "model": shape,
            "rows": num_rows,
            "tokens/s": rate,
            "bare vLLM": bare_rate,
            "ratio": rate / bare_rate,
        }


def generate_bare(engine: Any, num_rows: int, new_tokens: int) -> int:
    """Return the number of tokens of `LLM.generate`, without seeds and log-probabilities."""
    vllm = engine.vllm
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num_rows // GROUP)]
    settings = vllm.SamplingParams(
        n=GROUP, temperature=1.0, max_tokens=new_tokens, stop_token_ids=engine.stop_ids,
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    outputs = engine.llm.generate(
        [vllm.inputs.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        settings,
        use_tqdm=False,
    )
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def sleeping(engine: Any, shape: str) -> Iterator[dict[str, Any]]:
    """Measure the memory that sleep frees, and the seconds of sleep and wake."""
    before, _ = torch.cuda.mem_get_info()
    down = seconds_of(engine.sleep, torch.device("cuda"))
    during, _ = torch.cuda.mem_get_info()
    up = seconds_of(engine.wake, torch.device("cuda"))
    yield {
        "model": shape,
        "freed, GiB": (during - before) / 2**30,
        "sleep, s": down,
        "wake, s": up,
    }
