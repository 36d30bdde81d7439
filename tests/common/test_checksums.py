"""JSON files with a checksum: every flipped bit is detected or changes nothing."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError, write_text
from tasks.common.recovery import how_to_restore

VALUE = {
    "num_samples": 8,
    "pass_at": {1: 0.4375, 16: 0.5, 2: None},
    "verifiers": ["é", "1"],
    "zeta": True,
}
READ = {**VALUE, "pass_at": {"1": 0.4375, "16": 0.5, "2": None}}


def test_every_flipped_bit_is_detected_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "flops.json"
    write_checked(path, VALUE)
    assert read_checked(path) == READ
    content, messages = path.read_bytes(), []
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert read_checked(path) == READ
        except ArtifactError as error:
            messages.append(str(error))
    assert len(messages) > 0.9 * 8 * len(content)  # the others are between white space
    assert all(f"{path} is damaged" in words for words in messages)
    assert all("Delete it and run the same command again" in words for words in messages)


def test_file_is_plain_json_and_equal_values_make_equal_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write_checked(one, VALUE)
    write_checked(other, dict(reversed(VALUE.items())))
    assert one.read_bytes() == other.read_bytes()
    value = json.loads(one.read_text())
    assert list(value)[-1] == "winnow-sha256"
    one.write_text(json.dumps(value))  # formatted in another way
    assert read_checked(one) == READ
    write_checked(other, read_checked(one))
    assert other.read_text().count("winnow-sha256") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"digest": "5d41"}', "has no winnow-sha256"),
        ("[1, 2]", "has no winnow-sha256"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_file_without_a_checksum_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "flops.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=message):
        read_checked(path)


def write_lock(root: str, **outputs: dict[str, str]) -> None:
    """Write the dvc.lock of a data root of a project, with a stage's output paths and digests."""
    for folder in (root, ".dvc"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    stages = {
        stage: {"outs": [{"path": path, "md5": digest} for path, digest in of.items()]}
        for stage, of in outputs.items()
    }
    Path(root, "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data/prompts/test.parquet", "run `winnow run`: the stage ingest restores"),
        ("data/policy/a", "run `winnow run`: the stage policy restores"),
        ("data/runs/a/0/train/policy", "stage train@a-0 restores"),
        ("other/policy/a", "`winnow run --data other`: the stage policy restores"),
        ("families/x/profile/flops.json", "run the same command again"),
    ],
)
def test_remedy_names_the_command_and_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = {"train@a-0": {"data/runs/a/0/train/policy": "5d41.dir"}}
    prompts = {"data/prompts/test.parquet": "5d41"}
    write_lock(".", ingest=prompts, policy={"data/policy": "5d41.dir"}, **trained)
    write_lock("other", policy={"other/policy": "5d41.dir"})
    assert re.search(words, how_to_restore(Path(path)))


@pytest.mark.parametrize(
    ("root", "path"),
    [(".", "data/profile/a"), ("other", "other/profile/a"), ("a", "a/policy")],
)
def test_remedy_names_a_damaged_copy_in_dvcs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, path: str
) -> None:
    """DVC would restore the file from it. Only an intact copy of a file, or of a folder with this
    file, leaves that to DVC."""
    monkeypatch.chdir(tmp_path)
    digest = hashlib.md5(b"whole").hexdigest()
    listed = json.dumps([{"md5": digest, "relpath": "b"}])
    folder = hashlib.md5(listed.encode()).hexdigest() + ".dir"
    cache = Path(".dvc/cache/files/md5")
    copy = cache / digest[:2] / digest[2:]
    write_text(copy, "whole")
    write_text(cache / folder[:2] / folder[2:], listed)
    write_lock(root, profile={"data/x": "", path: folder if path == "a/policy" else digest})
    damaged = Path(path) / "b" if path == "a/policy" else Path(path)
    assert "restores it from DVC's cache" in how_to_restore(damaged)
    copy.write_bytes(b"whale")
    assert f"copy in DVC's cache, {copy}, which is damaged as well" in how_to_restore(damaged)
    for lock in (b"half a fi", b"\xff\xfe{", b"stages: {ingest: 5}", b"stages: {a: {outs: [{}]}}"):
        Path(root, "dvc.lock").write_bytes(lock)
        assert "run the same command again" in how_to_restore(damaged)


def test_missing_key_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "flops.json"
    write_checked(path, {"seconds": {"train": 60.0}})
    values = read_checked(path)
    assert values == {"seconds": {"train": 60.0}}
    for missing, at in (("lost", values), ("profile", values["seconds"])):
        expected = f"{path} has no {missing}: it is another file"
        with pytest.raises(ArtifactError, match=expected):
            at[missing]
