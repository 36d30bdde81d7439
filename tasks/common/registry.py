"""The file name is the registry: `load(package, "sgpo", ...)` imports `package/sgpo.py`. A new
method is a new file.

Settings from params.yaml are bound to a method's keyword-only arguments. An unknown or missing
argument is an error that names it and lists the arguments of the method."""

import ast
import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks.common.params import ParamsError, check_keys, convert, gathered, unknown


def names(package: ModuleType) -> list[str]:
    """Return the names of the modules and packages in `package`, except its `SHARED` modules, which
    the others use."""
    shared = getattr(package, "SHARED", ())
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name not in shared
    )


def load(package: ModuleType, name: Any, where: str) -> ModuleType:
    """Import and return the module `name` of `package`. Raise ParamsError with the key (`where`)
    and the existing names if there is none."""
    check(package, name, where)
    return importlib.import_module(f"{package.__name__}.{name}")


def check(package: ModuleType, name: Any, where: str) -> None:
    if name not in names(package):
        raise ParamsError(unknown(f"{where} is {name!r}; use", name, names(package)))


def declared(file: Path, name: str) -> Any:
    """Return the constant that a method's file assigns to `name`, in the module or in a class; None
    without one. The file is read, not imported, so that its dependencies are not loaded."""
    lines = ast.walk(ast.parse(file.read_bytes())) if file.exists() else []
    constants = {
        ast.unparse(line.targets[0]): line.value.value
        for line in lines
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
    }
    return constants.get(name)


def defaults(file: Path) -> dict[str, Any]:
    """Return the constant defaults of a method's settings. Its file is read, not imported."""
    lines = ast.parse(file.read_bytes()).body if file.exists() else []
    return {
        line.target.id: ast.literal_eval(line.value)
        for cls in lines
        if isinstance(cls, ast.ClassDef) and cls.name == "Settings"
        for line in cls.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(line.value, ast.Constant)
    }


def bind(
    function: Callable[..., Any], settings: Mapping[str, Any], where: str
) -> Callable[..., Any]:
    """Return `function` with its keyword-only arguments bound to `settings`. Raise ParamsError with
    all unknown and missing arguments, and values that are not of the declared types."""
    parameters = inspect.signature(function).parameters
    allowed = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    required = [n for n in allowed if parameters[n].default is inspect.Parameter.empty]
    hints = typing.get_type_hints(function)
    with gathered() as problems:
        check_keys(settings, allowed, required, where, problems)
        bound = {
            key: problems.of(convert, value, hints[key], f"{where}.{key}")
            for key, value in settings.items()
            if key in allowed
        }
    return functools.partial(function, **bound)
