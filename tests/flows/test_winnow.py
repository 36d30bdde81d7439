"""The `winnow` command on the scratch project: refusals, plans, and the pages."""

import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.__main__ import SUBCOMMANDS, parser_of
from flows.cli import costs, init
from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.policy.source import EMBEDDED
from tests.flows.project import ROOT, Project, lines
from tests.parameters import every_value
from tests.patience import PATIENCE


def contents(root: Path) -> dict[str, str]:
    """Return all files of a project except those of DVC and Python."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
        and not {"__pycache__", ".git", "tmp", "locks"} & set(path.relative_to(root).parts)
    }


def test_flow_lists_all_faults(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.edit("recipes/sgpo.yaml", "trivial_above: 0.75", "trival: 1")
    project.edit("params.yaml", r"^  dtype: float32", "  dtype: float23")
    output = project.flow(expect=1)
    assert "refused: 3 things are wrong:" in output
    refusal = output.partition("refused:")[2]
    assert refusal.count("did you mean float32?") == 2  # of engine and train
    assert "train.dtype is 'float23'" in output
    assert "recipe sgpo: allocate.trival is unknown" in output
    assert lines(output, "starts") == []
    assert project.winnow("doctor", expect=1).startswith("3 things are wrong:")


def test_completion_contains_subcommands_and_options(project: Project) -> None:
    script = project.winnow("--print-completion", "bash")
    (words,) = re.findall(r"_winnow_pos_0_choices=\((.*)\)", script)
    assert set(SUBCOMMANDS) <= {*words.split()}
    (options,) = re.findall(r"_winnow_run_option_strings=\((.*)\)", script)
    assert "--concurrency" in options.split()


def test_faults_do_not_stop_a_run_without_work(project: Project) -> None:
    (project.root / "data" / "tracking").touch()
    assert "nothing to do" in project.without_server().flow()


def test_plan_lists_stale_stages_and_changes_nothing(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.edit("tasks/train/methods/loss/clip.py", r"\Z", "MORE = 1\n")
    project.edit("tasks/store/folder.py", r"\Z", "# a comment\n")
    cluster = "{ray: 'head:6379', trainers: 2, engines: 1, gpus_per_engine: 1, shared: data}"
    project.edit("params.yaml", r"^  num_replicas: 1", f"  cluster: {cluster}\n  num_replicas: 1")
    before = contents(project.root)
    output = project.winnow("plan", "sgpo")
    assert contents(project.root) == before
    reasons = {line.split()[0]: line.rsplit("  ", 1)[-1] for line in output.splitlines() if line}
    # the change of the cluster repeats no other stage
    assert reasons["code"].startswith("tasks changed; engine.cluster (none) -> ")
    assert reasons["allocate@sgpo-0"] == "allocate.passes 4 -> 5"
    assert reasons["train@sgpo-0"] == "code tasks/train/methods/loss/clip.py changed"
    assert reasons["evaluate@sgpo-0"] == "after train@sgpo-0"
    assert not {"profile", "baseline", "allocate@grpo-0", "report"} & set(reasons)
    assert "3 would run, 1 may" in output


def test_help_lists_every_subcommand_in_its_group(project: Project) -> None:
    listed = project.winnow("--help")
    groups = re.findall(r"^  (\w[\w ]+):\n((?:    .*\n)+)", listed, flags=re.MULTILINE)
    found = {title: re.findall(r"^    (\w+) ", text, flags=re.MULTILINE) for title, text in groups}
    assert list(found) == ["start", "run", "look", "share and maintain"]
    assert [name for names in found.values() for name in names] == [*SUBCOMMANDS]
    assert found["run"] == ["run", "serve", "bench"]


@pytest.mark.parametrize("arguments", [("plan",), ("data",), ("status",), ("run",), ("init",)])
def test_folder_that_is_no_project_is_refused(arguments: tuple[str, ...], project: Project) -> None:
    """Neither the surrounding project nor the installed one may be used silently."""
    for folder in (project.root / "examples/mine", project.root.parent / "mine"):
        (folder / "below").mkdir(parents=True)
        shutil.copy(project.root / "params.yaml", folder)
        inside = Project(folder / "below", project.environment | {"PYTHONPATH": str(project.root)})
        assert f"{folder} has a params.yaml, but is no Winnow project" in inside.winnow(
            *arguments, expect=1
        )
    root = project.root / "other"
    root.mkdir()
    for name in ("params.yaml", "dvc.yaml"):  # a data root is not refused
        shutil.copy(project.root / name, root)
    environment = project.environment | {"PYTHONPATH": str(project.root)}
    assert "experiment.recipes" in Project(root, environment).winnow("params")


def test_make_env_says_what_to_do_next(tmp_path: Path) -> None:
    (tmp_path / ".installed-none").touch()
    command = ["make", "--no-print-directory", "env", f"VENV={tmp_path}", "VLLM=none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"source {tmp_path}/bin/activate, then winnow init" in done.stdout.splitlines()[-1]


def test_plan_and_doctor_end_with_the_budget(project: Project) -> None:
    shutil.copy(EMBEDDED.policy_card, project.root / "data/policy.json")
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    for word in ("plan", "doctor"):
        output = project.winnow(word, "--price", "2")
        assert "executed buys, expected" in output
        assert "there is no GPU here, so --price has no GPU-hours to count" in output
        assert "test prompts with 4 samples resolve" in output.splitlines()[-1]
    project.edit("params.yaml", r"amount: \S+", "amount: 2.0e+11}")
    output = project.winnow("doctor", expect=1)
    assert output.startswith("1 thing is wrong:")
    assert "budget is 2e+11 of executed, and the profile" in output
    assert "takes about" in output


def test_plan_with_other_values_writes_nothing(project: Project) -> None:
    before = contents(project.root)
    seeds, passes = "experiment.seeds=[0,7]", "allocate.passes=5"
    output = project.winnow("plan", "grpo", "--set", seeds, passes)
    assert contents(project.root) == before
    found = {line.split()[0]: line.rsplit("  ", 1)[-1] for line in output.splitlines()}
    assert found["code"] == f"--set {seeds} {passes}"
    assert found["allocate@grpo-0"].endswith("allocate.passes 4 -> 5")
    assert found["train@grpo-7"] == found["evaluate@grpo-7"] == "never run"
    assert not {"profile", "allocate@sgpo-7", "train@sgpo-0"} & set(found)
    secret = "store.location=s3://KEY:hidden@bucket/x"
    output = project.winnow("plan", "--set", secret, expect=1)
    assert "credentials" in output
    assert "hidden" not in output


def test_missing_results_are_named(project: Project) -> None:
    assert "set RECIPE, --profile or --baseline" in project.winnow("read", expect=1)
    output = project.winnow("read", "pods", expect=1)
    assert "runs/pods/0/eval/rollouts.parquet does not exist" in output
    assert "Traceback" not in output


def test_numbers_have_three_digits_and_the_unit_after_rounding() -> None:
    shown = list(map(costs.short, (999.4, 999.6, 1500, 999_400, 999_600, 999.7e9, 4e18)))
    assert shown == ["999", "1k", "1.5k", "999k", "1M", "1T", "4.0e+18"]


def test_durations_have_the_unit_that_reads_best() -> None:
    shown = [costs.clock(hours) for hours in (0, 35 / 3600, 0.05, 0.3, 1, 23.4, 49, 157_831)]
    assert shown == ["0 s", "35 s", "3 min", "18 min", "1 h", "23 h", "2 d", "6,576 d"]


def test_validation_that_costs_more_than_training_is_noted(tmp_path: Path) -> None:
    """The budget buys rollouts only, and 22 points of the curve are validated besides."""
    values = every_value() | {"experiment": every_value()["experiment"] | {"recipes": ["grpo"]}}
    values["experiment"]["budget"] = {"account": "executed", "amount": 1e11}
    shutil.copy(EMBEDDED.policy_card, tmp_path / "policy.json")
    text = costs.bought(values, Layout(tmp_path), ["grpo"], None)
    assert "validation" in text.splitlines()[1].split()
    assert "note: recipe 'grpo': validation takes " in text
    values["train"]["validation"]["every_share"] = 0.5
    assert "note" not in costs.bought(values, Layout(tmp_path), ["grpo"], None)
    with pytest.raises(ParamsError, match="the profile, which recipe 'sgpo' reads, takes about"):
        costs.bought(values, Layout(tmp_path), ["grpo", "sgpo"], None)
    values["experiment"]["budget"]["amount"] = 4e12
    text = costs.bought(values, Layout(tmp_path), ["grpo", "brorl"], None)
    assert re.findall(r"note: recipe '(\w+)' makes 6 passes with groups of 8", text) == ["grpo"]


def test_costs_without_test_prompts_have_no_resolution(tmp_path: Path) -> None:
    values = every_value()
    values["ingest"]["splits"]["test"] = 0
    assert "resolve" not in costs.bought(values, Layout(tmp_path), [], None)


def test_every_subcommand_has_help() -> None:
    """A new process is used, since the import of Prefect changes the logging of this one."""
    program = (
        "from flows.__main__ import SUBCOMMANDS, parser_of\n"
        "for word in SUBCOMMANDS:\n"
        "    try: parser_of(word).parse_args([word, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [word for word in SUBCOMMANDS if f"usage: winnow {word} " not in printed] == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("ui", "--prefect-port", "0", "--mlflow-port"), "MLflow"),
        (("serve", "--prefect-port"), "Prefect"),
    ],
)
def test_port_in_use_is_named(arguments: tuple[str, ...], name: str, project: Project) -> None:
    del project.environment["PREFECT_API_URL"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        output = project.winnow(*arguments, port, expect=1)
    assert output.endswith(
        f"port {port} is in use: {name} may already be up (http://127.0.0.1:{port}); or use "
        f"another with {arguments[-1]}\n"
    )


MODEL = ("--model", "tiny", "--max-tokens", "48", "--gpu", "no", "--budget", "none")


def write_rows(path: Path) -> Path:
    rows = [{"question": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_init_writes_its_options_and_keeps_the_rest(project: Project) -> None:
    data = write_rows(project.root / "train.jsonl")
    before = (project.root / "params.yaml").read_text()
    output = project.winnow("init", *MODEL, "--data", str(data))
    after = (project.root / "params.yaml").read_text()
    values = params.load(project.root / "params.yaml")
    assert values["sampling"]["max_tokens"] == 48
    assert values["engine"]["device"] == "cpu"
    (source,) = values["ingest"]["sources"]
    assert (source["settings"]["path"], source["settings"]["verifier"]) == (data.name, "numeric")
    assert values["ingest"]["splits"] == {"train": None, "validation": 4, "test": 8}
    assert before[before.index("\nverify:") :] == after[after.index("\nverify:") :]
    assert "nothing is wrong" in output


@pytest.mark.parametrize("budget", ["nan", "-5", "0", "inf", "many"])
def test_init_refuses_an_invalid_budget(budget: str) -> None:
    with pytest.raises(ParamsError, match=budget):
        init.as_budget(budget)


def test_init_refuses_an_empty_file(project: Project) -> None:
    (project.root / "params.yaml").write_text("")
    assert "params.yaml is empty" in project.winnow("init", *MODEL, expect=1)


def test_init_asks_before_overwriting_changes(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    before = (project.root / "params.yaml").read_text()
    output = project.winnow("init", *MODEL, "--data", "embedded", expect=1)
    assert "has changes that are not committed" in output
    assert (project.root / "params.yaml").read_text() == before
    project.winnow("init", *MODEL, "--data", "embedded", "--overwrite")
    assert "  passes: 5" in (project.root / "params.yaml").read_text()


def test_init_asks_for_missing_options(project: Project) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows", "init", "--data", "embedded"],
        cwd=project.root,
        env=project.environment,
        input="\n32\nmaybe\nno\n\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "'maybe' is none of yes, no" in done.stdout
    assert params.load(project.root / "params.yaml")["sampling"]["max_tokens"] == 32


@pytest.mark.parametrize(
    ("num_parameters", "adapters", "rate", "size"),
    [(5e8, False, 1e-5, 64), (7e9, False, 1e-6, 256), (7e9, True, 1e-4, 256)],
)
def test_training_settings_depend_on_the_size_of_the_policy(
    num_parameters: float, adapters: bool, rate: float, size: int
) -> None:
    values = init.training(num_parameters, adapters)
    assert (values["train.learning_rate"], values["train.batch"]["size"]) == (rate, size)
    assert ("train.lora" in values) == adapters


def test_embedded_project_of_ones_own_names_no_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "true")  # no doctor
    line = ["init", str(tmp_path / "own"), "--model", "tiny", "--max-tokens", "64"]
    line += ["--data", "embedded", "--gpu", "no", "--budget", "none"]
    assert init.run(parser_of("init").parse_args(line)) == 0
    assert (ROOT / "params.yaml").read_text().startswith(f"{init.SCHEMA}# What people set.")
    assert (tmp_path / "own" / "params.yaml").read_text().startswith("# What people set.")


SVAMP = {"ID": "1", "Body": "A pen costs", "Equation": "x", "Answer": 7.0, "Type": "Subtraction"}
OWN_FILES = {
    "svamp": [{**SVAMP, "Question": f"{n} dollars?"} for n in range(10)],
    "gsm8k": [{"question": f"{n}?", "answer": "6/2=<<6/2=3>>3\n#### 3"} for n in range(10)],
}


@pytest.mark.parametrize(("preset", "cores", "threads"), [("svamp", 3, 3), ("gsm8k", 64, 16)])
def test_own_project_on_a_known_file_has_its_preset_and_comments(
    preset: str,
    cores: int,
    threads: int,
    tmp_path: Path,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "true")  # no doctor
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    data = tmp_path / "data.json"
    data.write_text(json.dumps(OWN_FILES[preset]))
    line = ["init", str(tmp_path / "own"), "--model", str(llama), "--max-tokens", "48", "--gpu"]
    line += ["no", "--adapters", "no", "--budget", "3e13", "--data", str(data)]
    assert init.run(parser_of("init").parse_args(line)) == 0
    text = (tmp_path / "own/params.yaml").read_text()
    values = params.load(tmp_path / "own/params.yaml")
    assert values["ingest"]["sources"] == [{"preset": preset, "settings": {"path": str(data)}}]
    assert "\n  budget: {account: executed, amount: 3.0e13}   # of every cell" in text
    assert values["experiment"]["budget"] == {"account": "executed", "amount": 3e13}
    assert values["engine"]["threads"] == threads
    for name in ("seeds", "splits", "source", "max_tokens", "device", "threads", "batch"):
        assert re.search(rf"^  {name}: .+   # \w", text, flags=re.MULTILINE), name


@pytest.mark.slow
def test_own_project_runs_on_this_installation(project: Project, llama: Path) -> None:
    """The project has a short params.yaml, and its own git and DVC. After a change of the installed
    code, a second run repeats only the stages that it affects."""
    data, folder = write_rows(project.root.parent / "mine.jsonl"), project.root.parent / "own"
    options = ("--model", str(llama), "--max-tokens", "48", "--gpu", "no", "--adapters", "no")
    options += ("--budget", "none", "--data", str(data))
    output = project.winnow("init", str(folder), *options)
    assert "nothing is wrong" in output
    assert "already has a .dvc" in project.winnow("init", str(folder), *options, expect=1)
    text = (folder / "params.yaml").read_text()
    values = params.load(folder / "params.yaml")
    assert len(text.splitlines()) < 40
    assert values["policy"]["source"] == str(llama)
    assert (values["train"]["learning_rate"], values["ingest"]["splits"]["test"]) == (1e-5, 8)
    assert (folder / ".git").is_dir()
    own = Project(folder, {**project.environment, "PYTHONPATH": str(project.root)})
    assert lines(own.flow("grpo", "--experiment"), "starts")
    assert (folder / "data" / "report" / "leaderboard.json").is_file()
    project.edit("tasks/report/real.py", r"\Z", "\nmark = 1\n")
    output = own.flow()
    assert lines(output, "starts") == ["report"]
    assert "code tasks/report/real.py changed" in output
