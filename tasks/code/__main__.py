"""python -m tasks.code --params params.yaml --data data: for every cell, write a digest file of its
code, and a file of its settings.

    data/code/grpo/train.json          {"files": {"tasks/models/policy.py": "91c0...", ...},
                                        "versions": {"torch": "2.13.0", ...}}
    data/code/grpo/train.params.yaml   digest: 8c1f...
                                       train: {learning_rate: 0.0003, ...}
    data/code/params.yaml              params.yaml, with the experiment's recipes: what stages read

Every other stage depends on its two files instead of on the code: a new comment reruns no stage,
and a new method reruns only the recipes that name it. This stage takes about a second and is not
tracked. See `cells.py` (counted files), `left_out.py` (excluded), `effective.py` (settings)."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.code.cells import cells
from tasks.code.effective import Values, complete, of_cells
from tasks.common import params, recipes
from tasks.common.code import ROOT, hexdigest, read
from tasks.common.files import ArtifactError, digest, read_json, write_json, write_text
from tasks.common.inputs import Inputs
from tasks.common.layout import Layout
from tasks.common.processes import ending


def write(values: dict[str, Any], root: Path, folder: Path) -> None:
    """Write the files of the experiment in `folder`, and remove all others."""
    whole = complete(values)
    written = set()
    for name, cell in cells(whole, root).items():
        written.add(folder / f"{name}.json")
        write_json(folder / f"{name}.json", cell.digests(root))
    for name, settings in of_cells(whole).items():
        written.add(folder / f"{name}.params.yaml")
        write_text(folder / f"{name}.params.yaml", dumped(with_digest(name, settings)))
    named = {name: recipes.resolved(values, name) for name in whole["recipes"]}
    written.add(folder / "params.yaml")
    write_text(folder / "params.yaml", dumped({**values, "recipes": named}))
    for path in folder.rglob("*.*"):
        if path.is_file() and path not in written:
            path.unlink()


def with_digest(name: str, settings: Values) -> Values:
    """Return the settings of a cell with their digest. DVC omits keys named `size` and `nfiles`
    from the key of its run cache (dvc issue 10296), so that the key needs a digest of all values.
    The policy never enters that cache (see dvc.yaml)."""
    return settings if name == "policy" else {"digest": digest(settings), **settings}


def dumped(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False))


def write_note(root: Path, layout: Layout) -> None:
    """Write the note with the digest of the bytes, and of the code, of every file in a cell."""
    cells_here = layout.code_folder.rglob("*.json")
    files = {name: found for path in cells_here for name, found in read_json(path)["files"].items()}
    seen = {name: [hexdigest(read(root / name)), found] for name, found in files.items()}
    write_json(layout.code_note, seen)


def main() -> int:
    ending.begin_stage()
    parser = argparse.ArgumentParser(prog="python -m tasks.code")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file")
    parser.add_argument("--data", type=Path, default=Path("data"), help="data root")
    options = parser.parse_args()
    layout = Layout(options.data)
    try:
        inputs = Inputs.at_start(layout, "code") if "DVC_STAGE" in os.environ else None
        write(params.load(options.params), ROOT, layout.code_folder)
        write_note(ROOT, layout)
        if inputs:
            inputs.check()
    except (params.ParamsError, ArtifactError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
