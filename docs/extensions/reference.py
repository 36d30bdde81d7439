"""The API reference: one page per package, written from the docstrings before Sphinx reads its
sources.

The files are parsed, never imported, so the reference builds without torch or any other library of
the project. Docstrings are Markdown. Names with a leading underscore are excluded."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_reference(app: Any) -> None:
    """Write `reference/`. An unchanged page keeps its time, so Sphinx reads it only once."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": text for name, text in packages()}
    names = "\n".join(name.removesuffix(".md") for name in pages)
    pages["index.md"] = (
        "# Reference\n\nA page for each package, from the docstrings.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
    )
    for stale in set(folder.glob("*.md")) - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def packages() -> Iterator[tuple[str, str]]:
    """Yield (dotted name, page) of every package with documentation."""
    for top in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            name = ".".join(folder.relative_to(ROOT).parts)
            modules = sorted(folder.glob("*.py"))
            sections = [text for path in modules if (text := section(name, path))]
            if sections:
                yield name, f"# `{name}`\n\n" + "\n".join(sections)


def section(package: str, path: Path) -> str:
    """Return the section of a module: its docstring, its public constants with a docstring, classes
    and functions."""
    tree = ast.parse(path.read_text())
    about = ast.get_docstring(tree)
    if path.stem == "__init__":
        return f"{about}\n" if about else ""
    if path.stem == "__main__":
        return f"## `python -m {package}`\n\n{about}\n" if about else ""
    if not about:
        return ""
    name = f"{package}.{path.stem}"
    parts = [f"## `{name}`\n\n``````{{py:module}} {name}\n``````\n\n{about}\n"]
    parts += [directive("data", *entry, depth=6) for entry in variables(tree.body)]
    parts += [definition(node, depth=6) for node in public(tree.body)]
    return "\n".join(parts)


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """Yield the classes and functions of a body with a docstring and without an underscore."""
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) or isinstance(node, ast.ClassDef):
            yield node


def variables(body: list[ast.stmt], all_of_them: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (declaration, docstring) of the names that a body assigns: names with a string below
    them, or all names of a class."""
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=hint):
                options = f"{name}\n:type: {ast.unparse(hint)}"
            case ast.Assign(targets=[ast.Name(id=name)]):
                options = name
            case _:
                continue
        match below:
            case ast.Expr(value=ast.Constant(value=str() as about)):
                yield options, about
            case _ if all_of_them and not name.startswith("_"):
                yield options, ""


def definition(node: Definition, depth: int, method: bool = False) -> str:
    """Return a class with its fields and methods, or a function."""
    about = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        inner = [directive("attribute", *entry, depth=depth - 1) for entry in fields(node)]
        inner += [definition(child, depth - 1, method=True) for child in public(node.body)]
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        title = f"{node.name}({bases})" if bases else node.name
        return directive("class", title, "\n\n".join([about, *inner]), depth)
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    options = "".join(
        f"\n:{name}:" for name in ("classmethod", "staticmethod") if name in decorators
    )
    if "property" in decorators:
        hint = f"\n:type: {ast.unparse(node.returns)}" if node.returns else ""
        return directive("property", f"{node.name}{hint}", about, depth)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    title = f"{node.name}({arguments(node)}){returns}{options}"
    return directive("method" if method else "function", title, about, depth)


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the arguments as written, without `self` and `cls`."""
    written = ast.unparse(node.args)
    first, _, rest = written.partition(", ")
    return rest if first in ("self", "cls") else written


def fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Return the fields of a dataclass or a Protocol."""
    return [entry for entry in variables(node.body, all_of_them=True) if ":type:" in entry[0]]


def directive(kind: str, title: str, about: str, depth: int) -> str:
    """Return a directive of Sphinx's Python domain, fenced by `depth` backticks."""
    fence = "`" * depth
    return f"{fence}{{py:{kind}}} {title}\n\n{about}\n{fence}\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write_reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
