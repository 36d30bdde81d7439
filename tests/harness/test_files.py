"""Which lines of a task file could run code, and what its digest is made of."""

from pathlib import Path

import pytest

from tasks.common.config.yaml_entries import entries
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
METRICS = ["exact_match", "acc"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One task file and its table."""
    table = tmp_path / "tables" / "sums.jsonl"
    return plant(
        tmp_path,
        {
            "tables/sums.jsonl": '{"question": "1 + 1 =", "answer": "2"}\n',
            "tasks/sums.yaml": TASK.format(table=table),
        },
    )


def said(folder: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        files.check(files.task_files(folder / "tasks"), METRICS)
    return str(refused.value)


def test_a_task_of_data_and_templates_is_taken(folder: Path) -> None:
    files.check(files.task_files(folder / "tasks"), METRICS)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("process_docs: !function utils.clean", "!function utils.clean is Python"),
        ("class: !function task.Mine", "!function task.Mine is Python"),
        ("process_docs: !!python/name:os.system", "python/name:os.system is Python"),
        ("metadata: !!python/object/apply:os.system [ls]", "is Python"),
        ("metric_list: [{metric: ./mine.py}]", "no metric './mine.py'"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "a metric of the library `evaluate`"),
        ("dataset_path: pandas", "dataset_path is 'pandas'"),
        ("dataset_path: ./loader", "dataset_path is './loader'"),
        ("dataset_kwargs: {trust_remote_code: true}", "trust_remote_code runs what a hub has"),
        ("a: &m ./mine.py\nmetric_list: [{metric: *m}]", "no metric './mine.py'"),
        ("<<: {dataset_path: pandas}", "dataset_path is 'pandas'"),
    ],
)
def test_a_line_that_could_run_code_is_named(folder: Path, line: str, why: str) -> None:
    plant(folder, {"tasks/more/other.yaml": f"task: other\n{line}\n"})
    message = said(folder)
    assert "other.yaml line " in message
    assert why in message
    assert "sums.yaml" not in message


def test_what_a_task_file_includes_is_read_as_well(folder: Path) -> None:
    plant(folder, {"base": "doc_to_text: !function utils.text\n"})
    with (folder / "tasks/sums.yaml").open("a") as file:
        file.write("<<: {include: ../base}\n")
    assert "base line 1: !function utils.text is Python" in said(folder)
    (folder / "base").unlink()
    with pytest.raises(ArtifactError, match="base does not exist, and a task file includes it"):
        files.task_files(folder / "tasks")


def test_files_that_come_with_the_harness_are_trusted(folder: Path) -> None:
    plant(folder, {"lm_eval/gsm8k.yaml": "doc_to_text: !function utils.text\n"})
    with (folder / "tasks/sums.yaml").open("a") as file:
        file.write(f"include: {folder}/lm_eval/gsm8k.yaml\n")
    files.check(files.task_files(folder / "tasks", trusted=folder / "lm_eval"), METRICS)


def test_a_folder_without_task_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no task file: their names end in .yaml"):
        files.task_files(tmp_path)
    with pytest.raises(ArtifactError, match="is not a folder"):
        files.task_files(tmp_path / "nothing")


def test_the_digest_is_of_task_files_code_and_tables(folder: Path) -> None:
    def digest() -> str:
        return files.fingerprint(files.task_files(folder / "tasks"))

    digests = [digest()]
    for name in ("tables/sums.jsonl", "tasks/utils.py", "tasks/sums.yaml"):
        with (folder / name).open("a") as file:
            file.write("# more\n")
        digests.append(digest())
    assert len(set(digests)) == 4
    plant(folder, {"tables/other.jsonl": "{}\n"})
    assert digest() == digests[-1]


def test_a_table_that_is_not_there_is_named_with_its_line(folder: Path) -> None:
    (folder / "tables/sums.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"sums.yaml line 3: .*sums.jsonl does not exist"):
        files.fingerprint(files.task_files(folder / "tasks"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a [*a]\n", "nested more than 100 times"),
        ("a: [1\n", "is not YAML"),
        (
            "a: &a [0,0,0,0,0,0,0,0,0,0]\n"
            + "".join(
                f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
                for before, name in zip("abcdef", "bcdefg", strict=True)
            ),
            "its aliases multiply",
        ),
    ],
)
def test_yaml_that_is_not_written_by_hand_is_refused(tmp_path: Path, text: str, why: str) -> None:
    plant(tmp_path, {"task.yaml": text})
    with pytest.raises(ArtifactError, match=why):
        entries(tmp_path / "task.yaml")
