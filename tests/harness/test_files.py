"""The files of a folder of tasks, and their digest."""

from pathlib import Path

import pytest

from tasks.common.files import ArtifactError
from tasks.harness import files
from tests.files import plant

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {table}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = tmp_path / "tables" / "sums.jsonl"
    return plant(
        tmp_path,
        {
            "tables/sums.jsonl": '{"question": "1 + 1 =", "answer": "2"}\n',
            "tasks/sums.yaml": TASK.format(table=table),
        },
    )


def test_included_files_are_task_files(folder: Path) -> None:
    plant(folder, {"base": "doc_to_text: !function utils.text\n"})
    with (folder / "tasks/sums.yaml").open("a") as file:
        file.write("include: ../base\n")
    assert folder / "base" in files.task_files(folder / "tasks")
    (folder / "base").unlink()
    with pytest.raises(ArtifactError, match="base does not exist, and a task file includes it"):
        files.task_files(folder / "tasks")


def test_files_of_the_harness_are_excluded(folder: Path) -> None:
    plant(folder, {"lm_eval/gsm8k.yaml": "doc_to_text: !function utils.text\n"})
    with (folder / "tasks/sums.yaml").open("a") as file:
        file.write(f"include: {folder}/lm_eval/gsm8k.yaml\n")
    found = files.task_files(folder / "tasks", installed=folder / "lm_eval")
    assert found == [folder / "tasks/sums.yaml"]


def test_a_folder_without_task_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no task file: their names end in .yaml"):
        files.task_files(tmp_path)
    with pytest.raises(ArtifactError, match="is not a folder"):
        files.task_files(tmp_path / "nothing")


@pytest.mark.parametrize(
    "data",
    [
        "dataset_path: json\ndataset_kwargs: {{data_dir: {0}/tables, data_files: sums.jsonl}}\n",
        "dataset_path: {0}\ndataset_kwargs: {{data_dir: tables}}\n",
    ],
)
def test_the_digest_covers_task_files_code_and_tables(folder: Path, data: str) -> None:
    def digest() -> str:
        return files.fingerprint(files.task_files(folder / "tasks"))

    plant(folder, {"tasks/sums.yaml": data.format(folder), "tasks/lib/metrics.py": ""})
    digests = [digest()]
    for name in ("tables/sums.jsonl", "tasks/utils.py", "tasks/lib/metrics.py", "tasks/sums.yaml"):
        with (folder / name).open("a") as file:
            file.write("# more\n")
        digests.append(digest())
    assert len(set(digests)) == 5
    plant(folder, {"other/other.jsonl": "{}\n"})
    assert digest() == digests[-1]


def test_a_missing_table_is_named(folder: Path) -> None:
    (folder / "tables/sums.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"sums.yaml: .*sums.jsonl does not exist"):
        files.fingerprint(files.task_files(folder / "tasks"))


@pytest.mark.parametrize("text", ["a: [1\n", "[" * 2_000], ids=["unfinished", "nested"])
def test_a_file_that_is_not_yaml_is_refused(folder: Path, text: str) -> None:
    plant(folder, {"tasks/other.yaml": text})
    with pytest.raises(ArtifactError, match="other.yaml is not YAML"):
        files.task_files(folder / "tasks")
