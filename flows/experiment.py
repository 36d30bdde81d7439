"""Which recipes the experiment compares: written into params.yaml, where DVC and everybody else
reads it."""

import logging
import re
from pathlib import Path

from tasks.common import params, recipes
from tasks.common.files import write_text
from tasks.common.params import ParamsError

logger = logging.getLogger(__name__)

LINE = re.compile(
    r"^(experiment:[^\n]*\n(?:[ ]+[^\n]*\n|\s*\n)*?[ ]+recipes:[ ]*)\[[^\]\n]*\]", re.MULTILINE
)


def set_recipes(path: Path, words: str) -> list[str]:
    """Make `words` (names with spaces or commas between them, or `all`) the experiment's recipes;
    all else in the file stays as it is. Raises ParamsError for a name that is no recipe, and for a
    file without such a line."""
    values = params.load(path)
    known = recipes.names(values)
    chosen = known if words.strip() == "all" else re.split(r"[\s,]+", words.strip())
    for name in chosen:
        recipes.recipe(values, name)
    if chosen == params.section(values, "experiment", params.Experiment).recipes:
        return chosen
    text, count = LINE.subn(
        lambda match: f"{match[1]}[{', '.join(chosen)}]", path.read_text(), count=1
    )
    if not count:
        raise ParamsError(
            f"{path} has no line `recipes: [...]` under `experiment`: name the recipes there by "
            "hand"
        )
    write_text(path, text)
    logger.warning("%s: experiment.recipes is now %s", path.name, ", ".join(chosen))
    return chosen
