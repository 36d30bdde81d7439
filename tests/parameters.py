"""params.yaml as the stages read it."""

from pathlib import Path
from typing import Any

from tasks.code.effective import as_dict, complete
from tasks.common import params, recipes
from tests.files import PROJECT as PROJECT


def every_value(file: Path = PROJECT / "params.yaml") -> dict[str, Any]:
    """Return params.yaml with all defaults and all built-in recipes, without the budget of the
    experiment."""
    values = params.load(file)
    every_recipe = {"recipes": recipes.names(values), "seeds": [0]}
    experiment = as_dict(values, "experiment")
    return {
        **complete({**values, "experiment": every_recipe}),
        "experiment": {**experiment, "budget": None},
    }
