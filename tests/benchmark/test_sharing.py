"""Several machines and one benchmark: claims, lines, and who runs what."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.benchmark import sharing
from tasks.benchmark.results import append_result, read_results, supersede
from tasks.benchmark.runner import run
from tasks.benchmark.sharing import Shared
from tasks.common.files import ArtifactError
from tests.benchmark.test_runner import PROTOCOL, ROOT, protocol_of, searched
from tests.parameters import every_value


def test_a_claimed_cell_is_left_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (Shared(str(tmp_path), owner) for owner in ("a", "b"))
    assert mine.claim("k1")
    assert not theirs.claim("k1")
    assert mine.claim("k1")  # after a restart
    assert theirs.claim("k2")
    monkeypatch.setattr(sharing, "CLAIM_SECONDS", -1.0)
    assert theirs.claim("k1")  # the owner died


def test_lines_are_read_once_and_never_halfway(tmp_path: Path) -> None:
    mine, theirs = (Shared(str(tmp_path), owner) for owner in ("a", "b"))
    assert theirs.new_lines() == []
    mine.put({"key": "k1", "test": 0.5})
    mine.put({"key": "k4", "failed": "disk full"})  # another machine may do better
    theirs.put({"key": "k1", "test": 0.6})  # too late
    assert mine.new_lines() == []
    (tmp_path / "lines" / "k2.json.c.tmp").write_text("{")  # being written, or left by a kill
    assert theirs.new_lines() == [{"key": "k1", "test": 0.5}]
    assert theirs.new_lines() == []
    (tmp_path / "lines" / "k3.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"k3\.json is not a line of the benchmark"):
        theirs.new_lines()


def test_a_superseded_line_does_not_come_back_without_its_mark(tmp_path: Path) -> None:
    protocol, values = protocol_of(tmp_path)
    _, results = searched(protocol, values, lambda cell, number: {"validation": 1.0 / number})
    file, shared = tmp_path / "r.jsonl", Shared(str(tmp_path / "shared"), "a")
    for line in (*results.values(), {"key": "old", "family": "small", "budget": 100}):
        append_result(file, line)
        shared.put(line)
    assert supersede(file, ["old"], "Why.") == 1
    before = file.read_text()
    run(protocol, values, tmp_path / "work", file, 1, Shared(str(tmp_path / "shared"), "b"))
    assert file.read_text() == before


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_two_machines_run_every_cell_once(tmp_path: Path) -> None:
    base = every_value()
    changes = {
        "ingest": {**base["ingest"], "splits": {"train": 16, "validation": 8, "test": 8}},
        "train": {"validation": {"num_samples": 1, "every_share": 1.0}},
        "evaluate": {"num_samples": 1, "pass_at": [1], "num_bootstrap": 20},
    }
    contestant = {"recipe": "grpo", "trials": 2, "budgets": [32], "knob": "allocate.group_size"}
    protocol = {
        **PROTOCOL,
        "contestants": [{**contestant, "values": [4, 8]}],
        "families": {"small": {"budgets": [32], "changes": changes}},
    }
    machines = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "protocol.yaml").write_text(yaml.safe_dump(protocol))
        command = [sys.executable, "-m", "flows", "bench", str(tmp_path / name / "protocol.yaml")]
        options = ["--work", str(tmp_path / name / "work"), "--shared", str(tmp_path / "shared")]
        machines.append(
            subprocess.Popen(
                [*command, *options, "--workers", "1"], cwd=ROOT, stderr=subprocess.PIPE, text=True
            )
        )
    errors = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    one, other = (read_results(tmp_path / name / "protocol.jsonl") for name in ("a", "b"))
    assert one.keys() == other.keys()
    tested = [line["settings"] for line in one.values() if line["measures"] == "test"]
    num_chosen = len({str(settings) for settings in tested})
    assert 1 <= num_chosen <= 2
    assert len(one) == 2 + 2 * num_chosen  # trials, and tests of what the accounts choose
    assert not [line for line in one.values() if "failed" in line]
    # what one machine ran the other took over, seconds and all
    assert sum(one[key] == other[key] for key in one) >= 3
