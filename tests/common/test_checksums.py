"""JSON files with a checksum: every flipped bit is detected or changes nothing."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError
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
    assert all("Delete it and run the stage profile again" in words for words in messages)


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


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data/prompts/test.parquet", "run `winnow run`: the stage ingest restores"),
        (
            "data/policy.json",
            r"Restore it from git \(git checkout -- data/policy.json\)",
        ),
        ("data/runs/a-b/3/plan/forecast.json", "stage allocate@a-b-3 restores"),
        ("data/runs/a/0/train/policy", "stage train@a-0 restores"),
        ("data/runs/a/0/train/policy.json", "stage train@a-0 restores"),
        ("other/profile/flops.json", "`winnow run --data other`: the stage profile restores"),
        ("data/rounds/2/prompts/train.parquet", "`winnow run`: the stage ingest restores"),
        ("data/rounds/2/baseline/metrics.json", "--data data/rounds/2`: the stage baseline"),
        ("families/x/profile/flops.json", "run the stage profile again"),
        ("data/locks/overrides.json", "run the same command again"),
    ],
)
def test_remedy_names_the_command_and_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dvc.yaml", "other/dvc.yaml", "data/rounds/2/dvc.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("data/prompts").mkdir()
    Path("data/rounds/2/prompts").symlink_to("../../prompts")
    with pytest.raises(ArtifactError, match=words):
        raise ArtifactError(how_to_restore(Path(path)))


def test_remedy_names_a_damaged_copy_in_dvcs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC would restore the file from it."""
    monkeypatch.chdir(tmp_path)
    path, content = Path("data/prompts/test.parquet"), b"whole"
    digest = hashlib.md5(content).hexdigest()
    copy = Path(".dvc/cache/files/md5") / digest[:2] / digest[2:]
    for each in (path, copy):
        each.parent.mkdir(parents=True)
    Path("dvc.yaml").touch()
    outputs = [{"path": "data/prompts/x"}, {"path": str(path), "md5": digest}]
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": {"ingest": {"outs": outputs}}}))
    copy.write_bytes(content)
    path.write_bytes(b"whale")
    assert "restores it from DVC's cache" in how_to_restore(path)
    copy.write_bytes(b"whale")
    assert f"copy in DVC's cache, {copy}, which is damaged as well" in how_to_restore(path)
    for damaged in (
        b"half a fi",
        b"\xff\xfe{",
        b"stages: {ingest: 5}",
        b"stages: {a: {outs: [{}]}}",
    ):
        Path("dvc.lock").write_bytes(damaged)
        assert "restores it from DVC's cache" in how_to_restore(path)


def test_missing_key_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "flops.json"
    write_checked(path, {"seconds": {"train": 60.0}})
    values = read_checked(path)
    assert values == {"seconds": {"train": 60.0}}
    for missing, at in (("lost", values), ("profile", values["seconds"])):
        expected = f"{path} has no {missing}: it is another file"
        with pytest.raises(ArtifactError, match=expected):
            at[missing]
