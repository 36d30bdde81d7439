"""The metrics of servers for the tracker, from vLLM's Prometheus metrics."""

import re
from collections import Counter

from tasks.common.files import ArtifactError
from tasks.engines.engine import Unavailable
from tasks.engines.server.endpoints import HEALTH_SECONDS, Connection, Endpoint

COUNTERS = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions")
CACHE_USAGE = "kv_cache_usage_perc"  # a gauge, from 0 to 1
LINE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Meter:
    """The growth of each counter since a server's first reading, summed over all servers; the
    highest KV cache usage of all readings; and the seconds of sampling."""

    def __init__(self) -> None:
        self.last: dict[Endpoint, Counter[str]] = {}
        self.sums = Counter[str]()
        self.cache_usage = self.seconds = 0.0

    async def read(self, connection: Connection) -> str:
        """Read a server's metrics, and return them as text. The text is empty if there are none:
        servers other than vLLM's may have no metrics."""
        try:
            url = f"{connection.endpoint.root}/metrics"
            text = await connection.text(url, seconds=HEALTH_SECONDS)
        except (Unavailable, ArtifactError):
            return ""
        counts = Counter[str]()
        for name, value in LINE.findall(text):  # a line for each part of a server
            if name in COUNTERS:
                counts[name] += float(value)  # type: ignore[assignment]
            elif name == CACHE_USAGE:
                self.cache_usage = max(self.cache_usage, float(value))
        last = self.last.get(connection.endpoint, counts)
        has_restarted = any(counts[name] < last[name] for name in COUNTERS)  # at zero
        self.sums += counts if has_restarted else counts - last
        self.last[connection.endpoint] = counts
        return text

    def figures(self) -> dict[str, float]:
        """Return the metrics for the tracker; an empty dict if no server has counters. The cache
        usage is omitted if it was 0 at every reading."""
        if not any(self.last.values()):
            return {}
        found = {name: float(self.sums[name]) for name in COUNTERS}
        if self.seconds:
            found["generation_tokens_per_second"] = found["generation_tokens"] / self.seconds
        if self.cache_usage:
            found[CACHE_USAGE] = self.cache_usage
        return {f"engine/{name}": value for name, value in found.items()}
