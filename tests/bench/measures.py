"""The size of the project, and whether a limit is exceeded.

    python -m tests.bench.measures

Prints a row for each measure: its value, its limit and the aim. The status is 1 if a value exceeds
its limit. Limits are lowered as the code shrinks, and raised only on purpose."""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.code.cells import cells
from tasks.code.effective import complete
from tasks.common import params

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
REGISTRIES = ("methods", "strategies", "sources", "verifiers", "families", "cli", "targets")
# one file per method, subcommand or target


@dataclass(frozen=True)
class Measure:
    """A row of the table. For example Measure("product lines", 47_000, 48_000, 39_000)."""

    name: str
    value: float
    limit: float
    aim: float

    @property
    def is_exceeded(self) -> bool:
        return self.value > self.limit


def measures(root: Path) -> Iterator[Measure]:
    """Yield every measure of the tree at `root`."""
    product = [*files(root / "tasks"), *files(root / "flows")]
    yield Measure("product lines", num_lines(product), 57_420, 39_000)
    for folder, limit, aim in (
        ("flows", 8_545, 5_600),
        ("tasks/common", 6_785, 4_200),
        ("tasks/grading", 6_700, 4_800),
        ("tasks/ingest", 3_965, 3_000),
        ("tasks/report", 2_972, 2_500),
        ("tasks/engines", 5_285, 4_000),
    ):
        yield Measure(f"lines in {folder}", num_lines(files(root / folder)), limit, aim)
    training = [path for path in files(root / "tasks/train") if "methods" not in path.parts]
    yield Measure("lines in tasks/train without methods", num_lines(training), 10_090, 5_000)
    yield Measure(
        "lines in tasks/train/loop", num_lines(files(root / "tasks/train/loop")), 2_005, 1_830
    )

    reached = reach_of_a_cell(root)
    yield Measure("lines that a train cell can reach", num_lines(reached), 17_020, 9_500)
    yield Measure("files that a train cell can reach", len(reached), 139, 75)
    yield Measure("test lines", num_lines(files(root / "tests")), 48_221, 28_000)

    folders = Counter(path.parent for path in product if path.name != "__init__.py")
    crowded = max(
        n for path, n in folders.items() if not {path.name, path.parent.name} & {*REGISTRIES}
    )
    yield Measure("code files in one folder", crowded, 16, 16)
    functions = [node for path in product for node in functions_of(path)]
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno)
    yield Measure("lines of a function, median", statistics.median(lengths), 8, 8)
    yield Measure("lines of a function, 90th percentile", lengths[len(lengths) * 9 // 10], 20, 20)
    yield Measure("lines of a function, longest", lengths[-1], 60, 60)
    yield Measure("nested blocks in a function", max(map(depth, functions)), 5, 5)


def files(folder: Path) -> list[Path]:
    """Return the Python files under a folder."""
    return sorted(folder.rglob("*.py"))


def num_lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of the files, including blank lines and comments."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def reach_of_a_cell(root: Path) -> list[Path]:
    """Return the files that can change the training of `grpo`, by the code digests."""
    cell = cells(complete(params.load(root / "params.yaml")), root)["grpo/train"]
    return [root / name for name in cell.digests(root)["files"]]


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions and methods of a file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)]


def depth(node: ast.AST) -> int:
    """Return the nesting depth of blocks in `node`. An `elif` adds no level."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def main() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    rows = list(measures(ROOT))
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}} {'is':>8} {'limit':>8} {'aim':>8}")
    for row in rows:
        mark = "  exceeds its limit in tests/bench/measures.py" if row.is_exceeded else ""
        print(f"{row.name:{width}} {row.value:8,.0f} {row.limit:8,.0f} {row.aim:8,.0f}{mark}")
    return int(any(row.is_exceeded for row in rows))


if __name__ == "__main__":
    sys.exit(main())
