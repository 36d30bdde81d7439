"""A small OpenAI-compatible server around the `hf` engine, on loopback, which can misbehave.

It implements the part of vLLM's protocol that the engine `server` uses. So tests of servers that
fail, misreport or restart need no vLLM."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web

from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.settings import Sampling
from tasks.engines.weights import changes


@dataclasses.dataclass
class Behaviour:
    """Settings and counters of a server. Tests may change them while it runs."""

    names: list[str]
    key: str | None = None  # the required bearer token
    # the status that rejects the n-th completion, if any
    fault: Callable[[int], int | None] = lambda number: None
    first_token: int | None = 0  # added to all tokens; without it answers contain no tokens
    fingerprint: str = "vllm-0.32.0-0123abcd"
    raw_logprobs: bool = False  # log-probabilities without the temperature
    delay: float = 0.0  # seconds before a completion is answered
    hangs: bool = False  # connections stay open without an answer
    takes: bool = True  # whether new weights are accepted
    loads: bool = True  # whether accepted weights are put into effect
    finishes: bool = True  # whether an update can be ended
    version: str = "default"  # the reported version, also of weights that are not in effect
    paused: bool = False
    updating: bool = False  # during an update another one is rejected
    requests: int = 0  # completions requested
    served: int = 0  # completions answered
    num_tokens: int = 0  # of the completions
    has_metrics: bool = True
    in_flight: int = 0
    most_in_flight: int = 0
    prompts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


class Server:
    """A context manager. The server listens at `url`. `stop` closes it during requests, like a
    crash."""

    def __init__(self, engine: HfEngine, names: list[str], **behaviour: Any) -> None:
        self.engine, self.does = engine, Behaviour(names, **behaviour)
        self.lock, self.port = threading.Lock(), 0
        self.handlers: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> "Server":
        self.thread.start()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.close(), self.loop).result()

    async def close(self) -> None:
        """Cancel all handlers: the clean-up would wait for one that hangs."""
        for handler in list(self.handlers):
            handler.cancel()
        await self.runner.cleanup()

    async def listen(self) -> None:
        app = web.Application(middlewares=[self.hang])
        router = app.router
        router.add_get("/v1/models", self.models)
        router.add_post("/v1/completions", self.complete)
        router.add_post("/inference/v1/generate", self.generate)
        router.add_get("/metrics", self.metrics)
        router.add_get("/weight_info", self.info)
        router.add_get("/is_paused", self.is_paused)
        router.add_post("/{path:.*}", self.update)
        self.runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    @web.middleware
    async def hang(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer, unless the server hangs."""
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        task.add_done_callback(self.handlers.discard)
        if self.does.hangs:
            await asyncio.Event().wait()
        response: web.StreamResponse = await handler(request)
        return response

    def refuse(self, request: web.Request, status: int, words: str) -> web.Response:
        return web.json_response(
            {"error": words, "sent": request.headers.get("Authorization")}, status=status
        )

    async def models(self, request: web.Request) -> web.Response:
        if self.does.key and request.headers.get("Authorization") != f"Bearer {self.does.key}":
            return self.refuse(request, 401, "Unauthorized")
        return web.json_response(
            {"data": [{"id": name, "max_model_len": 512} for name in self.does.names]}
        )

    async def metrics(self, request: web.Request) -> web.Response:
        does = self.does
        lines = [
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0',
            "# TYPE vllm:num_preemptions_total counter",
            # a server of two engines
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {does.num_tokens}.0',
            'vllm:generation_tokens_total{engine="1",model_name="m"} 1e+03',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125',
            f'vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} {does.in_flight / 8}',
        ]
        return web.Response(text="\n".join(lines), status=200 if does.has_metrics else 404)

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.does.version})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.does.paused})

    async def update(self, request: web.Request) -> web.Response:
        """Answer a route of vLLM's protocol for new weights."""
        body = await request.json() if request.can_read_body else {}
        route, can_finish = request.path, self.does.finishes and self.does.updating
        if route in ("/pause", "/resume"):
            self.does.paused = route == "/pause"
        if route == "/start_weight_update" and self.does.updating:
            return self.refuse(request, 500, "a weight update is already active")
        if route == "/finish_weight_update" and not can_finish:
            return self.refuse(request, 500, "finish_weight_update called without a matching start")
        if route in ("/start_weight_update", "/finish_weight_update"):
            self.does.updating = route == "/start_weight_update"
        if info := body.get("update_info"):
            weights = dict(changes.read(info["path"], info["changes"]))
            if not self.does.takes:
                return self.refuse(request, 500, "There is no module named 'experts'")
            if self.does.loads:
                self.engine.set_weights({**self.engine.model.state_dict(), **weights})
        self.does.version = body.get("weight_version", self.does.version)
        return web.json_response({"success": True})

    async def complete(self, request: web.Request) -> web.Response:
        return await self.answer_to(request, await request.json())

    async def generate(self, request: web.Request) -> web.Response:
        """Answer in vLLM's own protocol for tokens."""
        body = await request.json()
        completion = {**body["sampling_params"], "prompt": body["token_ids"]}
        return await self.answer_to(request, completion, reports_versions=True)

    async def answer_to(
        self, request: web.Request, body: dict[str, Any], *, reports_versions: bool = False
    ) -> web.Response:
        does = self.does
        does.requests += 1
        if status := does.fault(does.requests):
            return self.refuse(request, status, "told to")
        does.in_flight += 1
        does.most_in_flight = max(does.most_in_flight, does.in_flight)
        try:
            await asyncio.sleep(does.delay)
            answer = await asyncio.to_thread(self.answer, body)
        finally:
            does.in_flight -= 1
        does.num_tokens += len(answer["choices"][0]["logprobs"]["token_logprobs"])
        does.served += 1
        does.prompts.append(tuple(body["prompt"]))
        if reports_versions:
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            choice["logprobs"] = {"content": [{"logprob": value} for value in logprobs]}
            span = {"version": does.version, "start": 0, "end": len(logprobs)}
            choice["weight_versions"] = [span]
        return web.json_response(answer)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            body["temperature"], body["top_p"], body["top_k"], body["max_tokens"], 0
        )
        with self.lock:
            stop_ids = self.engine.stop_ids
            self.engine.stop_ids = np.array(body["stop_token_ids"], dtype=np.int64)
            samples = self.engine.generate(Request([body["prompt"]], [1], [body["seed"]], sampling))
            self.engine.stop_ids = stop_ids
        scale = sampling.temperature if self.does.raw_logprobs else 1.0
        first = self.does.first_token
        choice = {
            "token_ids": None if first is None else [first + n for n in samples.token_ids[0]],
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [scale * value for value in samples.logprobs[0]]},
            "finish_reason": samples.finish_reasons[0],
        }
        return {"choices": [choice], "system_fingerprint": self.does.fingerprint}


class StandIn:
    """A substitute for a server that Winnow starts. Without `server` it ends before it answers."""

    def __init__(self, server: Server | None, name: str) -> None:
        self.server, self.is_gone = server, server is None
        self.endpoint = Endpoint(server.url if server else "", name=name, key="k")

    def is_serving(self) -> bool:
        return not self.is_gone

    def has_ended(self) -> bool:
        return self.is_gone

    def was_lost(self) -> bool:
        return False

    def log_tail(self) -> str:
        return "out of memory"

    def end(self) -> None:
        if self.server is not None and self.server.thread.is_alive() and not self.is_gone:
            self.server.stop()
        self.is_gone = True

    def wait(self) -> None:
        pass
