"""Values of a parameter file by `KEY=VALUE`, in the grammar of DVC: they mean what they mean to
`dvc exp run -S`."""

from pathlib import Path

from tasks.common.files import temporary_folder
from tasks.common.params import ParamsError


def overridden(path: Path, overrides: list[str]) -> str:
    """Return the text of the file with the overrides, comments kept; a key that the file does not
    have is added. DVC takes a second to import, and is only where there are some."""
    from dvc.exceptions import DvcException
    from dvc.utils.hydra import apply_overrides

    with temporary_folder(None, "winnow-overrides") as folder:
        copy = folder / path.name
        copy.write_text(path.read_text())
        try:
            apply_overrides(copy, [forced(override) for override in overrides])
        except DvcException as error:
            raise ParamsError(
                f"{' '.join(overrides)}: {error.__cause__ or error}. An override is KEY=VALUE with "
                f"a key of {path.name}, as in train.learning_rate=1e-4 or experiment.seeds=[0,1]"
            ) from error
        return copy.read_text()


def forced(override: str) -> str:
    """Return an override that also adds its key; `~key` and `+key=value` stay."""
    return override if override.startswith(("+", "~")) else f"++{override}"
