"""A name of a module without the rest of it."""

import subprocess
import sys

import pytest

from tasks.doctor.declared import declared, of
from tasks.doctor.sections import SECTIONS
from tests.files import plant
from tests.flows.project import ROOT

HEAVY = """
import torch_that_is_not_there
from dataclasses import dataclass
from typing import Literal

LEAST = 1
LEVELS = Literal["token", "sequence"]

def check(number: torch_that_is_not_there.Tensor) -> None:
    if number < LEAST:
        raise ValueError("too small")

@dataclass(frozen=True)
class Settings:
    level: LEVELS
    number: int

    def __post_init__(self) -> None:
        check(self.number)

class Method:
    value = torch_that_is_not_there.zeros(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    plant(tmp_path, {"heavy_module.py": HEAVY})
    monkeypatch.syspath_prepend(tmp_path)
    return "heavy_module"


def test_a_dataclass_is_read_without_what_the_rest_of_its_module_imports(module) -> None:
    settings = declared(module, "Settings")
    assert settings("token", 1).level == "token"
    with pytest.raises(ValueError, match="too small"):
        settings("token", 0)
    with pytest.raises(ModuleNotFoundError):
        declared(module, "Method")
    assert not of(module).has("Nothing")


def test_all_sections_and_settings_are_found_without_torch() -> None:
    """In a Python of its own: this one has imported it."""
    program = f"""
import importlib, sys
from tasks.common import registry
from tasks.doctor.declared import declared, of
for module, name in {list(SECTIONS.values())!r}:
    declared(module, name)
declared("tasks.train.run", "check_settings")
for slot in ("control", "generate", "select", "replay", "advantage", "loss"):
    package = importlib.import_module(f"tasks.train.methods.{{slot}}")
    for name in registry.names(package):
        file = of(f"tasks.train.methods.{{slot}}.{{name}}")
        if file.has("Settings"):
            file.get("Settings")
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "polars", "mlflow"} & set(done.stdout.split())


def test_a_slice_has_the_fields_of_the_class_itself() -> None:
    from tasks.train import settings
    from tasks.train.methods.control import sagc

    for module, name, cls in (
        ("tasks.train.settings", "TrainSettings", settings.TrainSettings),
        ("tasks.train.methods.control.sagc", "Settings", sagc.Settings),
    ):
        assert list(declared(module, name).__dataclass_fields__) == list(cls.__dataclass_fields__)
    assert of("tasks.train.run").get("params").ParamsError is declared(
        "tasks.common.params", "ParamsError"
    )
