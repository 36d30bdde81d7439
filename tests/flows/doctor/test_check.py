"""Findings of the doctor: all at once, each with a suggestion."""

import contextlib
import copy
import json
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from safetensors.numpy import save_file

from flows.doctor import machine, nvidia, parameters, places, rates
from flows.doctor.check import Findings, examine
from tasks.common import recipes
from tasks.common.files import write_json, write_text
from tasks.common.layout import Layout
from tasks.ingest import reading
from tasks.ingest.files import fetching
from tests.ingest.helpers import lines
from tests.parameters import every_value

VALUES = every_value()
TURNS = {
    "method": "multi_turn",
    "environment": {"name": "higher_lowr"},
    "max_turns": 2,
    "max_turn_tokens": 8,
}


@pytest.fixture(autouse=True)
def no_connections(monkeypatch) -> None:
    """Refuse connections: the doctor fetches nothing."""

    def refuse(*_: Any) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def changed(**changes: Any) -> dict[str, Any]:
    """Return the real parameters with replaced values; `__` in a name separates levels."""
    values = copy.deepcopy(VALUES)
    for name, value in changes.items():
        *keys, last = name.split("__")
        part = values
        for key in keys:
            part = part[int(key) if isinstance(part, list) else key]
        part[last] = value
    return values


def found(tmp_path: Path, values: dict[str, Any]) -> Findings:
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    return examine(tmp_path / "params.yaml", Layout(tmp_path / "data"))


def errors(tmp_path: Path, **changes: Any) -> list[str]:
    return found(tmp_path, changed(**changes)).errors


def test_a_missing_teacher_is_named() -> None:
    assert places.check_teachers(changed(experiment__recipes=["grpo"])) == []
    [found] = places.check_teachers(changed(experiment__recipes=["grpo", "distil"]))
    assert found.startswith("recipe 'distil': train.reference.source: teacher")


def test_defaults_and_recipes_have_no_fault(tmp_path: Path) -> None:
    assert found(tmp_path, VALUES) == Findings([], [])
    assert not (tmp_path / "data").exists()
    names = [name for name in recipes.names({}) if name != "distil"]  # there is no teacher here
    assert errors(tmp_path, experiment__recipes=names) == []


def test_all_errors_are_found_at_once(tmp_path: Path) -> None:
    sgpo = {"allocate": {**VALUES["recipes"]["sgpo"]["allocate"]}, "train": {"los": {}}}
    sgpo["allocate"]["trivial_abov"] = sgpo["allocate"].pop("trivial_above")
    message = errors(
        tmp_path,
        sampling__temprature=1.0,
        engine__name="vlm",
        experiment__recipes=["grop", "sgpo"],
        recipes__sgpo=sgpo,
        policy__source="tinny",
        ingest__sources=[{"preset": "gsm8", "settings": {}}],
    )
    for wanted in (
        "sampling.temprature is unknown; .*did you mean",
        "recipe 'grop' is unknown; .*did you mean grpo?",
        "recipe sgpo: allocate.trivial_abov is unknown; .*did you mean trivial_above?",
        "recipe sgpo: train.los is unknown; .*did you mean loss?",
        "policy.source: tinny is not a folder; did you mean tiny?",
        "ingest.sources[0].preset is 'gsm8'; .*did you mean gsm8k?",
    ):
        first, _, last = wanted.partition(".*")
        assert any(first in line and last in line for line in message), (wanted, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine__name": "vlm"}, "engine.name is 'vlm'; use: "),
        ({"tracking__also": ["trackios"]}, "tracking.also[0] is 'trackios'; allowed: "),
        ({"engine__device": "cuda"}, "nvidia-smi finds no GPU"),
        ({"engine__urls": ["localhost:8000"]}, "is not a URL like http://127.0.0.1:8000/v1"),
        ({"gatse": {}}, "section 'gatse' is unknown"),
        ({"evaluate__pass_at": [1, 16]}, "pass@k needs at least k samples"),
        ({"experiment__seeds": []}, "experiment.seeds is empty"),
        ({"experiment__recipes": ["grpo", "grpo"]}, "has a duplicate"),
        ({"train__decay_share": 0.0}, "train.decay_share is 0.0"),
        ({"train__loss": {"method": "clip", "clip_hih": 0.3}}, "did you mean clip_high?"),
        ({"train__generate": TURNS}, "did you mean higher_lower?"),
        ({"train__batch__counts": "kept"}, "does not keep a fixed number"),
        ({"policy__tiny__families__0__name": "chainsum"}, "did you mean chain_sum?"),
        ({"verify__verifiers__new": {"method": "regx"}}, "did you mean regex?"),
        ({"ingest__sources__0__settings__tasks__0__verifier": "numerc"}, "mean numeric?"),
        ({"ingest__sources__0__settings__tasks__0__verifier": "qa"}, "qa needs settings. Paste"),
        ({"ingest__splits__validation": None}, "ingest.splits.validation is null"),
        ({"ingest__splits__test": 0}, "ingest.splits.test is 0, but policies are measured"),
        ({"tracking__uri": "ftp://x"}, "tracking.uri must be null, sqlite:///FILE"),
        ({"policy__source": "hf://org/name"}, "name a revision"),
        ({"policy__source": "package://gone/x.gguf"}, "the Python package gone is not installed"),
        ({"policy__source": "x.gguf"}, "policy.source: x.gguf is not a file"),
    ],
    ids=str,
)
def test_a_fault_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    found = errors(tmp_path, **changes)
    assert any(message in line for line in found), found


def test_a_similar_file_is_suggested(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", {"question": "1 + 1?", "answer": "It is 2. #### 2"})
    entry = {"preset": "gsm8k", "settings": {"path": str(tmp_path / "tran.jsonl")}}
    [line] = errors(tmp_path, ingest__sources=[entry])
    assert line.startswith(f"ingest.sources[0]: {tmp_path / 'tran.jsonl'}: No such file")
    assert line.endswith(f"; did you mean {tmp_path / 'train.jsonl'}?")
    entry["settings"]["path"] = str(tmp_path / "train.jsonl")
    assert errors(tmp_path, ingest__sources=[entry]) == []


def test_a_field_missing_in_every_row_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", *[{"questoin": "1 + 1?", "answer": "#### 2"}] * 3)
    entry = {"preset": "gsm8k", "settings": {"path": str(path)}}
    [line] = errors(tmp_path, ingest__sources=[entry])
    assert line.startswith("ingest.sources[0]: ingest.sources[0] (gsm8k): in every one of 3 rows")
    assert "there is no prompt field" in line
    lines(path, *[{"questoin": "1 + 1?", "answer": "#### 2"}] * 30)  # of which 20 are read
    [line] = errors(tmp_path, ingest__sources=[entry])
    assert "in every one of 20 rows there is no prompt field" in line
    lines(path, *[{"question": "1 + 1?", "answer": "2"}] * 30)  # later rows may be right
    [line] = found(tmp_path, changed(ingest__sources=[entry])).remarks
    assert line.endswith(
        "none of its first 20 rows can be used: the solution has no #### before its answer"
    )


def test_missing_solutions_are_a_remark(tmp_path: Path) -> None:
    """It is a remark, as later rows can have solutions."""
    seen = found(tmp_path, changed(train__warm_start={"data": "solutions"}))
    assert seen.errors == []
    [line] = seen.remarks
    assert line.startswith("recipe grpo, sgpo, winnow: train.warm_start.data is solutions, but")


def test_only_the_beginning_of_a_remote_file_is_read(tmp_path: Path, monkeypatch) -> None:
    """A file that cannot be reached is no error if its prompts are here."""
    monkeypatch.undo()  # this test connects to this machine
    monkeypatch.setattr(reading, "HEAD_BYTES", 1000)
    sent: list[int] = []

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"PAR1" * (self.path == "/table"))
            with contextlib.suppress(OSError):  # the reader closes the connection
                while len(sent) < 1000:
                    row = {"question": "1 + 1?", "answer": f"{' ' * 100_000}#### 2"}
                    sent.append(self.wfile.write(json.dumps(row).encode() + b"\n"))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    table, entry = (
        {"preset": "gsm8k", "settings": {"path": f"{address}/{name}"}} for name in ("table", "a")
    )
    layout = Layout(tmp_path / "data")
    [remark] = places.check_data(changed(ingest__sources=[table]), layout)[1]
    assert remark.startswith("ingest.sources[0] was not examined: only the beginning of the file")
    values = changed(ingest__sources=[entry])
    assert places.check_data(values, layout) == ([], [])
    assert len(sent) < 1000
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(fetching, "ATTEMPTS", 1)
    [line] = places.check_data(values, layout)[0]
    assert "cannot be fetched (ConnectError, 1 attempts)" in line
    layout.prompts("train").parent.mkdir(parents=True)
    layout.prompts("train").touch()
    assert places.check_data(values, layout) == ([], [line])


def test_a_model_outside_the_hubs_cache_is_an_error_only_offline(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    source = "hf://org/name@main"
    assert errors(tmp_path, policy__source=source) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not in the hub's cache" in errors(tmp_path, policy__source=source)[0]
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    write_text(cached / "refs" / "main", "abc")
    assert "has no config.json" in errors(tmp_path, policy__source=source)[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert errors(tmp_path, policy__source=source) == []  # the stage fetches the missing files
    make_model(cached / "snapshots" / "abc")
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    files = {name: {"size": 1, "blob_id": ""} for name in names}  # a README is never fetched
    write_json(cached / "trees" / "abc.json", {"format_version": 1, "files": files})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert errors(tmp_path, policy__source=source) == []


def make_model(folder: Path, length_name: str = "max_position_embeddings") -> None:
    """Make a policy of 12 parameters."""
    write_json(folder / "config.json", {"vocab_size": 7, length_name: 128, "text_config": None})
    write_json(folder / "tokenizer.json", {})
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(6)}, folder / "model.safetensors")


@pytest.mark.parametrize("length_name", ["max_position_embeddings", "n_positions"])
def test_a_models_sizes_are_read_from_its_files(tmp_path: Path, length_name: str) -> None:
    make_model(tmp_path / "model", length_name)
    values = changed(policy__source=str(tmp_path / "model"))
    model = places.describe_model(values, Layout(tmp_path / "data"))
    assert model == places.Model(12, 7, 128)
    assert found(tmp_path, values).errors == []
    values["sampling"]["max_tokens"] = 128
    assert "the policy's context is 128" in found(tmp_path, values).errors[0]


def test_a_folder_without_tokenizer_or_with_pickled_weights_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    [line] = errors(tmp_path, policy__source=str(tmp_path / "model"))
    assert line.startswith(f"policy.source: {tmp_path / 'model'} has no tokenizer (none of")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model.bin")
    [line] = errors(tmp_path, policy__source=str(tmp_path / "model"))
    assert line.startswith("policy.source: ")
    assert "pickled" in line
    values = changed(policy__source=str(tmp_path / "model"))
    assert places.describe_model(values, Layout(tmp_path / "data")) is None


CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def test_an_unused_chat_template_is_a_remark(tmp_path: Path) -> None:
    """Unless the source writes the template itself; a system message requires a template."""
    make_model(tmp_path / "model")
    values = changed(policy__source=str(tmp_path / "model"))
    values["ingest"]["sources"][0]["system"] = "Be brief."
    assert "[0].system: the policy has no chat template" in found(tmp_path, values).errors[0]
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert found(tmp_path, values) == Findings([], [])
    for change, is_named in (
        ({"raw": True}, True),
        ({"prompt_template": "Q: {prompt}"}, True),
        ({"prompt_template": CHATML}, False),
    ):
        values["ingest"]["sources"][0] = {**VALUES["ingest"]["sources"][0], **change}
        remarks = found(tmp_path, values).remarks
        assert ["chat template is not used" in one for one in remarks] == [True] * is_named


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    message = errors(tmp_path, store__location=str(blocked / "store"))
    assert len(message) == 1
    assert message[0].startswith(
        f"store.location: {blocked / 'store'}: a part of this path is a file"
    )


def test_a_full_disk_is_an_error_with_the_needed_space(tmp_path: Path, monkeypatch) -> None:
    """Weights of 10 GB: a run stores them twice, and three checkpoints thrice."""
    model = places.Model(2_500_000_000, None, None)
    usage = type("Usage", (), {"free": 109e9})
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: usage)
    values = changed(experiment__recipes=["sgpo"], checkpoint__keep=2)
    (Layout(tmp_path).train("another", 0) / "policy").mkdir(parents=True)
    [line] = places.check_disk(values, Layout(tmp_path), model)
    assert f"needs about {110e9 / 2**30:.3g} GiB" in line
    usage.free = 111e9
    assert places.check_disk(values, Layout(tmp_path), model) == []


def test_gpu_memory_is_checked_with_nvidia_smi() -> None:
    text = "NVIDIA H100 80GB HBM3, 79000, 81559\nNVIDIA X, [N/A], [N/A]\n"
    [gpu] = nvidia.parsed(text)
    assert (gpu.name, gpu.free) == ("NVIDIA H100 80GB HBM3", 79000 * 2**20)
    values = changed(engine__name="hf", engine__device="cuda")
    small, large = (places.Model(number, 32_000, None) for number in (500_000_000, 8_000_000_000))
    assert machine.check(values, small, [gpu]) == []
    assert "training does not fit this GPU" in machine.check(values, large, [gpu])[0]
    for bits, number in ((32, 8_000_000_000), (4, 100_000_000_000)):
        lora = {"rank": 8, "alpha": 16.0, "modules": ["all-linear"], "base_bits": bits}
        adapted = changed(engine__name="hf", engine__device="cuda", train__lora=lora)
        assert machine.check(adapted, places.Model(number, 32_000, None), [gpu]) == []
        assert machine.check(adapted, places.Model(5 * number, 32_000, None), [gpu]) != []
    served, middle = (
        changed(engine__name="server", engine__device="cuda"),
        places.Model(3_500_000_000, 32_000, None),
    )
    assert machine.check(served, middle, [gpu]) != []
    assert machine.check(served, middle, [gpu, gpu]) == []  # the server uses the other
    two = {"tensor_parallel_size": 2}
    split = changed(engine__name="server", engine__device="cuda", engine__vllm=two)
    assert machine.check(split, middle, [gpu] * 2) != []
    assert machine.check(split, middle, [gpu] * 3) == []
    values["engine"]["num_processes"] = 2
    assert "but there are 1 here" in machine.check(values, small, [gpu])[0]


def test_main_memory_of_training_on_a_cpu(monkeypatch) -> None:
    """135M parameters have 0.5 GiB each of weights and gradients and 1.0 GiB of moments; the engine
    and autocast have copies in 16 bits; and 1,024 tokens have logits."""
    values = changed(learner__tokens_per_logprob_chunk=1024)
    model = places.Model(134_500_000, 49_152, None)
    sizes = {"SC_PHYS_PAGES": 2.9 * 2**30 / 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(machine.os, "sysconf", sizes.get)
    assert machine.check(values, model, []) == []  # 2.0 and 0.75 GiB
    values["engine"]["dtype"] = values["train"]["dtype"] = "bfloat16"
    [line] = machine.check(values, model, [])
    assert line.startswith("training needs 3.3 GiB of main memory (weights 0.5, optimizer 1.0")


def test_settings_that_leave_a_cpu_idle_are_a_remark(monkeypatch) -> None:
    values, model = changed(engine__threads=1), places.Model(134_500_000, None, None)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert machine.idle_cpu(values, model, []) == []  # all settings are equally fast
    speeds = {"float32": 90e9, "bfloat16": 170e9}
    monkeypatch.setattr(rates, "probe", lambda threads, dtype: threads * speeds[dtype])
    [line] = machine.idle_cpu(values, model, [])
    assert "3.8 times as fast with engine.threads 2 and bfloat16 as engine.dtype" in line
    assert machine.idle_cpu(values, places.Model(440_000, None, None), []) == []
    fast = changed(engine__threads=2, engine__dtype="bfloat16", train__dtype="bfloat16")
    assert machine.idle_cpu(fast, model, []) == []


def test_nvidia_smi_that_fails_is_no_gpu(monkeypatch) -> None:
    monkeypatch.undo()

    def fail(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fail)
    assert nvidia.gpus() == []


def test_the_command_that_installs_a_missing_tracker_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(parameters, "is_installed", lambda name: name == "wandb")
    (message,) = errors(tmp_path, tracking__also=["wandb", "tensorboard"])
    assert message.startswith("tracking.also names tensorboard, which is not installed: python")
    assert message.endswith('--editable ".[tensorboard]", or remove it')


def test_a_folder_of_a_tracker_is_no_package(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not parameters.is_installed("left_by_a_tracker")
    assert parameters.is_installed("yaml")


def test_an_invalid_yaml_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("a: [")
    assert "is not YAML" in examine(tmp_path / "params.yaml", Layout(tmp_path)).errors[0]


@pytest.mark.parametrize("broken", [[3], {"grpo": {"train": {"a": 3}}}])
@pytest.mark.parametrize("name", ["ingest", "policy", "recipes", "train", "verify", "experiment"])
def test_sections_of_a_wrong_type_are_errors(tmp_path: Path, name: str, broken: Any) -> None:
    assert errors(tmp_path, **{name: broken})
