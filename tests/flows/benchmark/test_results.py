"""The results file: lines are only added and marked."""

import hashlib
import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from flows.benchmark.results import (
    append_result,
    files_of,
    read_lines,
    read_results,
    supersede,
    texts_of,
)
from tasks.common.files import ArtifactError

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"


def test_a_mark_changes_nothing_else_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for line in ({"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3}):
        append_result(path, line)
    before = path.read_text()
    assert supersede(path, ["b", "stranger"], "Its code is another.") == 1
    marked = '{"key": "b", "n": 2, "superseded": "Its code is another."}'
    assert path.read_text() == before.replace('{"key": "b", "n": 2}', marked)
    assert list(read_results(path)) == ["a"]
    append_result(path, {"key": "b", "n": 4})
    assert path.read_text().startswith(before.replace('{"key": "b", "n": 2}', marked))
    assert read_results(path)["b"]["n"] == 4
    # a mark is not replaced; the current line gets its own
    assert supersede(path, ["b"], "Another reason.") == 1
    reasons = [line.get("superseded") for line in read_lines(path)]
    assert reasons == [None, "Its code is another.", None, "Another reason."]
    assert supersede(path, ["b"], "A third.") == 0


def test_finished_results_are_compressed_and_have_their_lines() -> None:
    """The digests are those of the files before they were compressed (sha256sum)."""
    digests = dict(
        reversed(line.split()) for line in (RESULTS / "SHA256SUMS").read_text().splitlines()
    )
    assert len(digests) == 6
    found = {
        file.stem: hashlib.sha256(b"\n".join(texts_of(file))).hexdigest()
        for file in RESULTS.glob("*.jsonl.zst")
    }
    assert found == digests
    assert sum(file.stat().st_size for file in RESULTS.glob("*.jsonl*")) <= 2_000_000


def test_lines_are_added_beside_compressed_ones(tmp_path: Path) -> None:
    """Two compressed parts, as `zstd -c r.jsonl >> r.jsonl.zst` makes them, are one file."""
    path, packed = tmp_path / "r.jsonl", tmp_path / "r.jsonl.zst"
    parts = b'{"key": "a"}\n', b'{"key": "b"}\n'
    packed.write_bytes(b"".join(pa.compress(part, "zstd", asbytes=True) for part in parts))
    before = packed.read_bytes()
    append_result(path, {"key": "c"})
    append_result(path, {"key": "b", "n": 2})  # counts in place of the compressed one
    assert packed.read_bytes() == before
    assert [line["key"] for line in read_lines(path)] == ["a", "b", "c", "b"]
    assert read_results(path)["b"] == {"key": "b", "n": 2}
    assert supersede(path, ["c"], "Why.") == 1
    assert packed.read_bytes() == before
    assert supersede(path, ["a", "b"], "Why.") == 3
    marked = b'{"key": "a", "superseded": "Why."}\n{"key": "b", "superseded": "Why."}\n'
    assert pa.decompress(packed.read_bytes(), len(marked), "zstd", asbytes=True) == marked
    assert read_results(path) == {}
    assert len(path.read_text().splitlines()) == 2
    packed.write_bytes(before[:-3])
    with pytest.raises(ArtifactError, match=r"r\.jsonl\.zst cannot be read, restore it"):
        read_lines(path)


def git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def history() -> list[str]:
    """Return the commits that changed a results file, or skip the test without a history."""
    try:
        if git("rev-parse", "--is-shallow-repository").strip() != b"false":
            pytest.skip("the history is shallow: the commits before are not here")
        found = git("log", "--full-history", "--format=%H", "--", ":(glob)docs/results/**/*.jsonl*")
        return found.decode().split()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git history here: {error}")


def unmarked(text: bytes) -> str:
    line = json.loads(text)
    return json.dumps({name: line[name] for name in sorted(line) if name != "superseded"})


def test_no_line_of_a_results_file_was_deleted() -> None:
    ever: dict[str, set[bytes]] = {}
    for commit in history():
        for name in git("ls-tree", "-r", "--name-only", commit, "docs/results/").decode().split():
            if ".jsonl" in name:
                stored = pa.BufferReader(git("show", f"{commit}:{name}"))
                kind = "zstd" if name.endswith(".zst") else None
                lines = bytes(pa.input_stream(stored, compression=kind).read()).splitlines()
                ever.setdefault(name.removesuffix(".zst"), set()).update(lines)
    assert ever
    for name, texts in ever.items():
        today = {
            unmarked(text) for file in files_of(ROOT / name) for text in texts_of(file) if text
        }
        deleted = {unmarked(text) for text in texts if text} - today
        assert not deleted, f"{name} lacks {len(deleted)} lines that it had: mark them superseded"


def test_a_mark_keeps_a_partial_last_line_and_the_next_line_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "results" / "r.jsonl"
    append_result(path, {"key": "a", "n": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "n"')
    assert list(read_results(path)) == ["a"]
    assert supersede(path, ["a", "b"], "Why.") == 1
    assert path.read_text() == '{"key": "a", "n": 1, "superseded": "Why."}\n{"key": "b", "n"'
    append_result(path, {"key": "c", "n": 3})
    append_result(path, {"key": "a", "n": 4})
    assert {key: line["n"] for key, line in read_results(path).items()} == {"a": 4, "c": 3}
    path.write_text('{"key": "a"}\n{"key": "b"}')  # whole, as an editor may leave it
    assert supersede(path, ["b"], "Why.") == 1
    append_result(path, {"key": "c"})
    assert [line["key"] for line in read_lines(path)] == ["a", "b", "c"]
    path.write_bytes(b'{"key": "a"}\nnons\xffnse\n{"key": "b"}\n')
    with pytest.raises(ArtifactError, match=r"r\.jsonl: line 2 is not a result"):
        read_results(path)
