"""python -m tasks.code --params params.yaml --data data: for every cell, write a digest file of its
code, and a file of its settings.

    data/code/grpo/train.json          {"files": {"tasks/models/policy.py": "91c0...", ...},
                                        "versions": {"torch": "2.13.0", ...}}
    data/code/grpo/train.params.yaml   train: {learning_rate: 0.0003, ...}

Every other stage depends on its two files instead of on the code: a new comment reruns no stage,
and a new method reruns only the recipes that name it. This stage takes about a second and is not
tracked. See `cells.py` (counted files), `left_out.py` (excluded), `effective.py` (settings)."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from tasks.code.cells import cells
from tasks.code.effective import complete, of_cells
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.files import ArtifactError, write_json, write_text
from tasks.common.layout import Layout
from tasks.common.processes import ending


def write(values: dict[str, Any], root: Path, folder: Path) -> None:
    """Write the files of the experiment in `folder`, and remove all others."""
    whole = complete(values)
    wanted = set()
    for name, cell in cells(whole, root).items():
        wanted.add(folder / f"{name}.json")
        write_json(folder / f"{name}.json", cell.digests(root))
    for name, chosen in of_cells(whole).items():
        wanted.add(folder / f"{name}.params.yaml")
        write_text(folder / f"{name}.params.yaml", yaml.safe_dump(chosen, sort_keys=False))
    for path in folder.rglob("*.*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def main() -> int:
    ending.begin_stage()
    parser = argparse.ArgumentParser(prog="python -m tasks.code")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file")
    parser.add_argument("--data", type=Path, default=Path("data"), help="data root")
    options = parser.parse_args()
    try:
        write(params.load(options.params), ROOT, Layout(options.data).code_folder)
    except (params.ParamsError, ArtifactError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
