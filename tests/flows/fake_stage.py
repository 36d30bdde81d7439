"""A stage that takes milliseconds. It writes a digest of its inputs to each output that the
dvc.yaml of its data root declares. The report names sgpo as the champion.

The scratch project of the tests runs it as `python -m tasks.<stage>`. Its outputs depend on its
parameters and data, not on its code, like those of the real stages: a comment changes no output.
`behaviour.json` at the root makes a stage fail, hang until it is killed, wait until all stages that
are to meet run at the same time, import until dvc ends, or run a shell command."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tasks.common.checksums import write_checked
from tasks.common.files import ArtifactError
from tasks.common.inputs import Inputs, entry_of, params_file
from tasks.common.layout import Layout
from tasks.common.params import coordinates, load
from tasks.common.processes.ending import die_with_parent, interrupt_on_terminate

ROOT = sys.argv[sys.argv.index("--data") + 1]


def content(path: Path) -> list[tuple[str, str]]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def is_data(dep: str) -> bool:
    return dep.startswith(("data/", f"{ROOT}/")) and not dep.startswith(f"{ROOT}/code/")


def digest(entry: dict[str, Any], values: dict[str, Any]) -> str:
    """Return the digest of a stage's data, its settings, and the number of samples that it would
    draw with the parameters `values`."""
    files = [file for each in entry["params"] for file in each]
    read = [yaml.safe_load(Path(file).read_text()) for file in files]
    if any("profile" in each for each in read):
        read.append(values.get("profile"))
    data = [content(Path(dep)) for dep in entry["deps"] if is_data(dep)]
    return hashlib.sha256(json.dumps([read, data]).encode()).hexdigest()


def write(out: Any, text: str) -> None:
    path = Path(out if isinstance(out, str) else next(iter(out)))
    if path.name == "policy":
        write_policy(path, text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{path.name} {text}\n")


def write_policy(folder: Path, text: str) -> None:
    """Write a policy without weights, in the format that the flow expects."""
    header = json.dumps({"__metadata__": {"made": text}}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")


def read_behaviour() -> dict[str, str]:
    file = Path("behaviour.json")
    return json.loads(file.read_text()) if file.exists() else {}


def hang(stage: str) -> None:
    print(f"{stage}:  41%|####      | 41/100 [00:01<00:02, 3it/s]", file=sys.stderr, flush=True)
    Path(f"{stage}.hanging.pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def import_libraries(stage: str) -> None:
    """Simulate imports until dvc ends."""
    parent = os.getppid()
    Path(f"{stage}.hanging.pid").write_text(str(os.getpid()))
    while os.getppid() == parent:
        time.sleep(0.01)


def behave(stage: str) -> None:
    behaviour = read_behaviour()
    wanted = behaviour.get(stage)
    if wanted == "fail":
        sys.exit(3)
    if wanted == "hang":
        hang(stage)
    if wanted == "meet":
        Path(f"{stage}.met").touch()
        others = [name for name, action in behaviour.items() if action == "meet"]
        deadline = time.monotonic() + 600.0
        while not all(Path(f"{name}.met").exists() for name in others):
            if time.monotonic() > deadline:
                sys.exit(f"{stage} is alone")
            time.sleep(0.02)
    if wanted and wanted.startswith("sh: "):
        subprocess.run(wanted.removeprefix("sh: "), shell=True, check=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    if "--cells" in sys.argv:
        page = Path(ROOT) / "report" / "index.html"
        page.write_text(" ".join(sys.argv[sys.argv.index("--cells") + 1 :]))
        return
    if read_behaviour().get(os.environ["DVC_STAGE"]) == "import":
        import_libraries(os.environ["DVC_STAGE"])
        die_with_parent()
        hang(os.environ["DVC_STAGE"])
    die_with_parent()
    interrupt_on_terminate()
    stage, recipe, seed = coordinates(os.environ["DVC_STAGE"].rpartition(":")[2])
    layout = Layout(Path(ROOT))
    try:
        inputs = Inputs.at_start(layout, stage, recipe, seed)
    except ArtifactError as error:
        sys.exit(str(error))
    values = load(params_file(layout, Path(sys.argv[sys.argv.index("--params") + 1])))
    print(f"this is {os.environ['DVC_STAGE']}, live", flush=True)
    print(f"GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}", file=sys.stderr, flush=True)
    try:
        behave(os.environ["DVC_STAGE"])
    except KeyboardInterrupt:
        with open("graceful", "a") as file:
            file.write(stage)
        sys.exit(130)
    if stage == "profile":
        note = Path(ROOT) / "draws" / "profile.json"
        write(str(note), "")
        message = "40 rollouts reused, 8 sampled: 1 prompt new to the store"
        write_checked(note, {"sampled": {"said": message}})
    entry = entry_of(layout, stage, recipe, seed)
    made = digest(entry, values)
    for out in entry["outs"]:
        write(out, made)
    if stage == "report":
        summary = {"champion": {"recipe": "sgpo", "seed": 0}, "why": f"as it is {made}"}
        write_checked(Path(ROOT) / "report" / "summary.json", summary)
    try:
        inputs.check()
    except ArtifactError as error:
        sys.exit(str(error))


main()
