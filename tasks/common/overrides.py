"""Values of a parameter file by `KEY=VALUE`, in the grammar of DVC: they mean what they mean to
`dvc exp run -S`."""

from pathlib import Path

from tasks.common.files import temporary_folder
from tasks.common.params import ParamsError


def overridden(path: Path, overrides: list[str]) -> str:
    """Return the text of the file with the overrides, comments kept. Raises ParamsError for a key
    that the file has not. DVC takes a second to import, and is only where there are some."""
    from dvc.exceptions import DvcException
    from dvc.utils.hydra import apply_overrides

    with temporary_folder(None, "winnow-overrides") as folder:
        copy = folder / path.name
        copy.write_text(path.read_text())
        try:
            apply_overrides(copy, overrides)
        except DvcException as error:
            raise ParamsError(
                f"{' '.join(overrides)}: {error.__cause__ or error}. An override is KEY=VALUE with "
                f"a key of {path.name}, as in train.learning_rate=1e-4 or experiment.seeds=[0,1]"
            ) from error
        return copy.read_text()
