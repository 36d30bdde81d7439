"""python -m tasks.code --params params.yaml --data data: a digest file for the code of every cell.

    data/code/profile.json      {"files": {"tasks/models/policy.py": "91c0...", ...},
    data/code/grpo/train.json    "versions": {"torch": "2.13.0", ...}}

Every other stage depends on its file, and on no code: a comment makes no stage run again, and a new
method none but the recipes that name it. Takes about a second, keeps no record, and imports nothing
but the standard library and yaml. Which files count: `cells.py`; which do not: `left_out.py`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tasks.code.cells import cells
from tasks.common import params, parent
from tasks.common.code import ROOT
from tasks.common.files import write_json
from tasks.common.layout import Layout


def write(values: dict[str, Any], root: Path, folder: Path) -> None:
    """Leave exactly the digest files of the experiment in `folder`."""
    wanted = {folder / f"{name}.json": cell for name, cell in cells(values, root).items()}
    for path, cell in wanted.items():
        write_json(path, cell.digests(root))
    for path in folder.rglob("*.json"):
        if path not in wanted:
            path.unlink()


def main() -> int:
    parent.die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m tasks.code")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file")
    parser.add_argument("--data", type=Path, default=Path("data"), help="data root")
    options = parser.parse_args()
    try:
        write(params.load(options.params), ROOT, Layout(options.data).code_folder)
    except params.ParamsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
