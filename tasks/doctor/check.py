"""Everything that can be known to be wrong before the first stage runs, at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.params import ParamsError
from tasks.doctor import machine, parameters, places, servers


@dataclass(frozen=True)
class Findings:
    """`errors` would stop a stage; `remarks` would not."""

    errors: list[str]
    remarks: list[str]


def examine(file: Path, layout: Layout) -> Findings:
    """Check the parameters, then the places and the machine that they name."""
    try:
        written = params.load(file)
    except ParamsError as error:
        return Findings([str(error)], [])
    errors, values = parameters.check(written)
    if errors or values is None:
        return Findings([*errors, *what_can_be_seen(written)], [])
    model = places.describe_model(values, layout)
    unanswered, silent = servers.check(values)
    errors = [
        *places.check_model(values),
        *places.check_data(values),
        *places.check_writable(values, layout),
        *places.check_context(values, model),
        *places.check_disk(values, layout, model),
        *machine.check(values, model, machine.gpus()),
        *unanswered,
    ]
    return Findings(errors, [*places.silent_tracking(values), *silent])


def what_can_be_seen(values: Mapping[str, Any]) -> list[str]:
    """The model and the data, where the sections that name them can be read although others
    cannot."""
    found = []
    for look in (places.check_model, places.check_data):
        try:
            found += look(values)
        except (KeyError, TypeError, AttributeError):
            continue  # what is wrong with that section has been said
    return found
