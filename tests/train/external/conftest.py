"""A root with a plan and a profile, and its grade service."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import uvicorn

from tasks.common import params
from tasks.common.artifacts import PROFILE, PROMPTS, Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import digest_file
from tasks.train.external import service
from tests.train.worlds import make_world

SIZES = [2, 2, 4, 4, 4, 2, 2, 2]  # of the visits; six prompts in turn


def make_root(root: Path, policy: Path) -> Layout:
    """Return a root with a plan and a profile, whose prompts are chats."""
    layout = make_world(root, policy, SIZES)
    for split in ("train", "validation", "test"):
        table = PROMPTS.read(layout.prompts(split))
        turns = [json.dumps([{"role": "user", "content": text}]) for text in table["prompt"]]
        PROMPTS.write(layout.prompts(split), table.with_columns(messages=pl.Series(turns)))
    rows = [
        {**PROFILE.example, "prompt_id": f"p{number}", "pass_rate": number / 8}
        for number in range(6)
    ]
    PROFILE.write(layout.profile / "profile.parquet", PROFILE.frame(rows))
    card = read_checked(layout.policy_card)
    write_checked(layout.profile / "summary.json", {"policy": card["digest"]})
    noted = {"profile": digest_file(layout.profile / "profile.parquet")}
    write_checked(layout.plan("r", 0) / "forecast.json", noted)
    return layout


@pytest.fixture
def layout(tmp_path: Path, qwen: Path) -> Layout:
    return make_root(tmp_path / "data", qwen)


@pytest.fixture
def grading(layout: Layout) -> Iterator[service.Service]:
    with service.opened(params.load(layout.root / "params.yaml"), layout) as opened:
        yield opened


@pytest.fixture
def address(grading: service.Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the root's verifiers, and yield the address."""
    app = service.application(grading, "secret")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    monkeypatch.setenv("WINNOW_GRADER", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WINNOW_TOKEN", "secret")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
