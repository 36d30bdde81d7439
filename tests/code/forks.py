"""python -m tests.code.forks: run stages one after the other, each in a fork of this process.

The slow libraries are imported once. The project's files are not, so every fork loads and records
them. (The forks import polars, and mlflow which imports it, because their threads do not survive a
fork.)

Reads a list of [stage, arguments, record file, log file] as JSON. The exit status is the number of
the first stage that failed, counted from 1."""

import importlib
import json
import os
import runpy
import sys
import traceback

from tests.code.hook.sitecustomize import Recorder

SLOW = ("reasoning_gym", "transformers.models.qwen3.modeling_qwen3")


def run(stage: str, arguments: list[str], record: str, log: str) -> None:
    """Run the stage with its output in a file; do not return."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["WINNOW_LOADED"] = record
    recorder = Recorder(record)
    sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
    sys.addaudithook(recorder.opened)
    sys.argv = [f"tasks.{stage}", *arguments]
    status = 1
    try:
        runpy.run_module(f"tasks.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    for name in SLOW:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] in ("tasks", "polars")]
    for number, request in enumerate(json.load(sys.stdin), 1):
        child = os.fork()
        if child == 0:
            run(*request)
        _, status = os.waitpid(child, 0)
        if status:
            return number
    return 0


if __name__ == "__main__":
    sys.exit(main())
