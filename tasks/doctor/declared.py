"""One name of a module without the rest of it: the dataclass that a section is read into, or the
function that checks it, without the import of torch beside it.

Of the module only those statements run that the name needs, and of the modules that they import
from this project likewise. A library is imported only where a needed statement names it."""

import __future__

import ast
import builtins
import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

LIGHT = ("tasks.common.params", "tasks.common.registry", "tasks.common.files")
"""Modules that are imported whole: others must get the same classes from them."""

Statement = ast.stmt


class Slice:
    """The part of one module that has been asked for so far."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"there is no module {module}")
        self.module, self.file = module, Path(spec.origin)
        self.package = module if self.file.name == "__init__.py" else module.rpartition(".")[0]
        self.values: dict[str, Any] = {"__name__": module, "__file__": str(self.file)}
        self.statements = {
            name: statement
            for statement in ast.parse(self.file.read_bytes()).body
            for name in bound_names(statement)
        }

    def has(self, name: str) -> bool:
        return name in self.statements

    def get(self, name: str) -> Any:
        """The value of a name of the module. Raises AttributeError where it has none."""
        if name not in self.values:
            if name not in self.statements:
                raise AttributeError(f"{self.module} has no {name}")
            self.run(self.statements[name], name)
        return self.values[name]

    def run(self, statement: Statement, name: str) -> None:
        """Run the statement that binds `name`, after those that it needs."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self.values[name] = self.imported(statement, name)
            return
        is_function = isinstance(statement, ast.FunctionDef)
        if is_function:
            # first, as it may call itself; what its annotations name is not needed
            self.values.setdefault(name, None)
        for needed in needed_names(statement):
            if needed in self.statements and needed != name:
                self.get(needed)
        tree = ast.fix_missing_locations(ast.Module([statement], []))
        flags = __future__.annotations.compiler_flag if is_function else 0
        code = compile(tree, self.file, "exec", flags, dont_inherit=True)
        exec(code, self.values)  # nosec B102  # a statement of this project's own file

    def imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        """What an import binds to `name`."""
        alias = next(a for a in statement.names if bound_by(a, statement) == name)
        if isinstance(statement, ast.Import):
            module = importlib.import_module(alias.name)
            return module if alias.asname else importlib.import_module(name)
        base = statement.module or ""
        if statement.level:
            base = importlib.util.resolve_name("." * statement.level + base, self.package)
        if (kind := submodule(base, alias.name)) is not None:
            name = f"{base}.{alias.name}"
            return importlib.import_module(name) if kind == "package" else Names(name)
        if base.startswith("tasks."):
            return declared(base, alias.name)
        return getattr(importlib.import_module(base), alias.name)


class Names:
    """Stands for a module of this project in a slice: its names are looked up when they are
    used."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return declared(self.module, name)


@cache
def of(module: str) -> Slice:
    """The slice of a module: one a process, so that a class is one class."""
    return Slice(module)


def declared(module: str, name: str) -> Any:
    """The value of `name` in `module`."""
    return (
        getattr(importlib.import_module(module), name) if module in LIGHT else of(module).get(name)
    )


def submodule(package: str, name: str) -> str | None:
    """`module` or `package` where a package of this project has one of this name; nothing but
    packages, which hold next to nothing, is imported."""
    spec = importlib.util.find_spec(package) if package.partition(".")[0] == "tasks" else None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (Path(folder) / name / "__init__.py").is_file():
            return "package"
        if (Path(folder) / f"{name}.py").is_file():
            return "module"
    return None


def bound_by(alias: ast.alias, statement: ast.Import | ast.ImportFrom) -> str:
    if alias.asname or isinstance(statement, ast.ImportFrom):
        return alias.asname or alias.name
    return alias.name.partition(".")[0]


def bound_names(statement: Statement) -> list[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [bound_by(alias, statement) for alias in statement.names]
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        inner = [node for target in statement.targets for node in ast.walk(target)]
        return [node.id for node in inner if isinstance(node, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def needed_names(statement: Statement) -> list[str]:
    """The names that a statement reads, in order; of a function without those of its
    annotations."""
    left_out: set[int] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef):
            annotations = [a.annotation for a in all_arguments(node.args)]
            for annotation in (*annotations, node.returns):
                if annotation is not None:
                    left_out |= {id(inner) for inner in ast.walk(annotation)}
    found = (
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
        and id(node) not in left_out
        and not hasattr(builtins, node.id)
    )
    return list(dict.fromkeys(found))


def all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
