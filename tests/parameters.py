"""params.yaml as the stages read it."""

from typing import Any

from tasks.code.effective import as_dict, complete
from tasks.common import params, recipes
from tests.files import PROJECT as PROJECT


def every_value() -> dict[str, Any]:
    """Every value with its default, and every built-in recipe; the experiment is the project's,
    without its budget."""
    values = params.load(PROJECT / "params.yaml")
    everyone = {"recipes": recipes.names(values), "seeds": [0]}
    experiment = as_dict(values, "experiment")
    return {
        **complete({**values, "experiment": everyone}),
        "experiment": {**experiment, "budget": None},
    }
