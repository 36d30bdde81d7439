"""Find all faults that can be found before the first stage runs, and report them together."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.doctor import forecast, machine, nvidia, parameters, places, servers
from tasks.common import params
from tasks.common.layout import Layout
from tasks.common.params import ParamsError


@dataclass(frozen=True)
class Findings:
    """The result of the checks: `errors` would stop a stage, `remarks` would not."""

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
        with suppress(KeyError, TypeError, AttributeError, ParamsError):
            # check the readable sections, even if others are not
            errors += places.check_model(written)
            errors += places.check_data(written, layout)[0]
        return Findings(errors, [])
    model, there = places.describe_model(values, layout), nvidia.gpus()
    unanswered, silent = servers.check(values)
    mismatched, unused = places.check_chat(values)
    misread, unreached = places.check_data(values, layout)
    errors = [
        *places.check_model(values),
        *places.check_teachers(values),
        *misread,
        *places.check_splits(values),
        *places.check_writable(values, layout),
        *places.check_context(values, model),
        *places.check_disk(values, layout, model),
        *machine.check(values, model, there),
        *unanswered,
        *forecast.refusals(values, layout, values["experiment"]["recipes"]),
        *mismatched,
    ]
    slow = machine.idle_cpu(values, model, there)
    return Findings(errors, [*unused, *unreached, *places.silent_tracking(values), *silent, *slow])
