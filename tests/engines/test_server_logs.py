"""Logs and metrics of servers that Winnow starts."""

from pathlib import Path

import pytest

from tasks.engines.server.logs import MAX_BYTES, MAX_STARTS, new_folder, shorten, tail
from tasks.models.policy import Policy
from tests.engines.conftest import REQUEST, Servers


def test_logs_of_the_newest_starts_are_kept(tmp_path: Path) -> None:
    for number in range(1, MAX_STARTS + 3):
        (new_folder(tmp_path) / "0.log").write_text(str(number))
    kept = {int(path.parent.name): path.read_text() for path in tmp_path.glob("*/0.log")}
    assert kept == {number: str(number) for number in range(3, MAX_STARTS + 3)}


def test_long_log_keeps_its_newer_half(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as server:
        server.write(b"old\n" * (MAX_BYTES // 4))
        shorten(log)
        assert log.stat().st_size == MAX_BYTES
        server.write(b"new\n")
        shorten(log)
        server.write(b"newer\n")
    assert log.stat().st_size == MAX_BYTES // 2 + len("newer\n")
    assert tail(log).endswith("old\nnew\nnewer\n")


@pytest.mark.vllm
def test_servers_write_logs_and_metrics(policy: Policy, servers: Servers) -> None:
    engine = servers.of(policy)
    before = engine.metrics()
    samples = engine.generate(REQUEST)
    after = engine.metrics()
    num_tokens = sum(map(len, samples.token_ids))
    counted = "engine/generation_tokens"
    assert after[counted] - before.get(counted, 0.0) >= num_tokens  # probes have tokens as well
    assert after["engine/generation_tokens_per_second"] > 0.0
    preempted = "engine/num_preemptions"  # updates in flight preempt rows
    assert after[preempted] == before.get(preempted, 0.0)
    newest = max(servers.logs.iterdir(), key=lambda path: int(path.name))
    for name in ("0.log", "1.log"):
        assert "Application startup complete" in (newest / name).read_text()
