"""What the pipeline reads and where it writes: there, readable, writable, large enough.

Nothing is downloaded. What lies on the Hugging Face hub is looked for in its cache on this machine;
of a web address nothing is asked."""

import math
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, read_json, require_writable
from tasks.common.layout import Layout
from tasks.common.params import ParamsError, meant
from tasks.common.sealed import read_sealed
from tasks.ingest.fetching import HUB as DATA_HUB
from tasks.models.folder import check_folder, shapes_in
from tasks.policy.source import HUB as POLICY_HUB

Values = Mapping[str, Any]
GIB = 2**30
TRACKING_SECONDS = 3.0
FLOAT32 = 4  # bytes
TRAINING_STATE = 3  # weights and AdamW's two moments


@dataclass(frozen=True)
class Model:
    """What is known of a policy before it is loaded; `vocab_size` and `max_length` are None where
    its configuration does not say."""

    num_parameters: int
    vocab_size: int | None
    max_length: int | None


def model_folder(source: str) -> Path | None:
    """Where the policy lies on this machine, if it does."""
    if source.startswith("hf://"):
        return hub_snapshot(source)
    return None if "://" in source or source == "tiny" else Path(source).expanduser()


def hub_cache() -> Path:
    """The hub's cache, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def hub_snapshot(source: str) -> Path | None:
    """The cached folder of one revision of a model."""
    match = POLICY_HUB.fullmatch(source)
    if match is None:
        return None
    return cached(f"models--{match['name'].replace('/', '--')}", match["revision"])


def cached(repository: str, revision: str) -> Path | None:
    """The snapshot of a repository in the hub's cache. A branch or tag is a file with the
    commit."""
    folder = hub_cache() / repository
    with suppress(OSError):
        revision = (folder / "refs" / revision).read_text().strip()
    snapshot = folder / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_model(values: Values) -> list[str]:
    """Whether the policy's folder is one, or its name can be fetched."""
    source = values["policy"]["source"]
    if source == "tiny" or source.startswith("s3://"):
        return [] if source == "tiny" else raised(bucket_has, source)
    if source.startswith("hf://"):
        if not POLICY_HUB.fullmatch(source):
            return [
                f"policy.source is {source!r}; name a revision (a commit hash): "
                "hf://org/name@revision"
            ]
        folder = hub_snapshot(source)
        if folder is None:
            return not_cached("policy.source", source)
    elif "://" in source:
        return [
            f"policy.source is {source!r}; choose from: tiny, a folder, hf://org/name@revision, "
            "s3://..."
        ]
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            guess = "; did you mean tiny?" if meant(source, ["tiny"]) else near(folder)
            return [f"policy.source: {folder} is not a folder{guess}"]
    return [f"policy.source: {m}" for m in raised(check_folder, folder)]


def raised(check: Callable[..., object], *arguments: Any) -> list[str]:
    """Return what a check that stops at the first problem reports; nothing where all is well."""
    try:
        check(*arguments)
    except (ParamsError, ArtifactError) as error:
        return [str(error)]
    return []


def not_cached(where: str, location: str) -> list[str]:
    """What is not in the hub's cache is fetched by its stage, unless that is forbidden."""
    if not is_offline():
        return []
    return [
        f"{where}: {location} is not in the hub's cache ({hub_cache()}), and HF_HUB_OFFLINE is "
        "set: unset it, or set a local path"
    ]


def near(path: Path) -> str:
    """The neighbour whose name is most like that of a path that is not there."""
    with suppress(OSError):
        guess = meant(path.name, [other.name for other in path.parent.iterdir()])
        if guess and guess != path.name:
            return f"; did you mean {path.parent / guess}?"
    return "" if path.parent.is_dir() else f"; {path.parent} is not there either"


def check_data(values: Values) -> list[str]:
    """Whether the files of the sources are there and can be read."""
    return [
        message
        for number, entry in enumerate(values["ingest"]["sources"])
        if isinstance(path := entry["settings"].get("path"), str)
        for message in source_file(path, f"ingest.sources[{number}].settings.path")
    ]


def source_file(location: str, where: str) -> Iterator[str]:
    """One file of a source."""
    scheme = location.partition("://")[0] if "://" in location else ""
    if scheme in ("http", "https"):
        return
    if scheme == "hf":
        match = DATA_HUB.fullmatch(location)
        if match is None:
            yield f"{where}: {location} is not hf://datasets/ORG/NAME@REVISION/PATH/OF/THE/FILE"
            return
        name = match["name"].replace("/", "--")
        folder = cached(f"datasets--{name}", match["revision"] or "main")
        if folder is None or not (folder / match["file"]).exists():
            yield from not_cached(where, location)
    elif scheme == "s3":
        yield from (f"{where}: {message}" for message in raised(bucket_has, location))
    elif scheme:
        yield f"{where}: {location!r} is not a location: give a file, s3://, hf:// or https://"
    else:
        path = Path(location).expanduser()
        if not path.is_file():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            yield f"{where}: {path} {what}{near(path)}"
        elif not os.access(path, os.R_OK):
            yield f"{where}: {path} cannot be read: check its permissions"


def bucket_has(location: str) -> None:
    """Raise ArtifactError where a bucket has nothing at `location`, or does not answer."""
    from tasks.common.locations import open_location, reaching

    files, path = open_location(location)
    with reaching(location):
        if not files.exists(path):
            raise ArtifactError(f"{location}: there is no such file or folder in the bucket")


def check_writable(values: Values, layout: Layout) -> list[str]:
    """Whether the data root, the store and the record can be written."""
    store = values["store"]["location"]
    found = [f"the data root: {m}" for m in raised(require_writable, layout.root)]
    if store and "://" in store:
        found += [f"store.location: {m}" for m in raised(bucket_takes, store)]
    elif store:
        found += [f"store.location: {m}" for m in raised(require_writable, Path(store))]
    uri = values["tracking"]["uri"]
    if uri and uri.startswith("sqlite:///"):
        database = Path(uri.removeprefix("sqlite:///"))
        found += [f"tracking.uri: {m}" for m in raised(require_writable, database.parent)]
    return found


def bucket_takes(location: str) -> None:
    """Raise ArtifactError where no object can be written below `location`."""
    from tasks.common.locations import open_location, reaching

    files, path = open_location(location)
    name = f"{path}/.doctor-{os.getpid()}"
    with reaching(location):
        files.pipe_file(name, b"")
        files.rm_file(name)


def silent_tracking(values: Values) -> list[str]:
    """A tracking server that does not answer stops nothing: its records wait in files."""
    uri = values["tracking"]["uri"] or ""
    if not uri.startswith(("http://", "https://")):
        return []
    try:
        health = f"{uri.rstrip('/')}/health"
        urllib.request.urlopen(health, timeout=TRACKING_SECONDS).close()  # nosec B310  # http, above
    except urllib.error.HTTPError as error:
        return [f"tracking.uri: the server answers {error.code}; records will wait in files"]
    except (OSError, ValueError) as error:
        return [f"tracking.uri: the server does not answer ({error}); records will wait in files"]
    return []


def describe_model(values: Values, layout: Layout) -> Model | None:
    """The sizes of the policy: those of its card where that is of the same source, else of its
    files; None where it is not on this machine yet."""
    source = values["policy"]["source"]
    with suppress(ArtifactError, KeyError, TypeError, OSError):
        card = read_sealed(layout.policy_card)
        if card["source"] == source:
            return Model(card["num_parameters"], card["vocab_size"], card["max_length"])
    folder = model_folder(source)
    if folder is None:
        return None
    with suppress(ArtifactError, OSError, ValueError):
        config = read_json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        weights = sorted(folder.glob("*.safetensors"))
        return Model(
            sum(num_elements(path) for path in weights),
            config.get("vocab_size"),
            config.get("max_position_embeddings"),
        )
    return None


def num_elements(path: Path) -> int:
    """The numbers in a safetensors file, by its header alone."""
    return sum(math.prod(shape) for shape in shapes_in(path).values())


def check_context(values: Values, model: Model | None) -> list[str]:
    """Whether completions fit the policy's context at all."""
    limit, asked = model.max_length if model else None, values["sampling"]["max_tokens"]
    if limit is None or asked < limit:
        return []
    return [
        f"sampling.max_tokens is {asked}, and the policy's context is {limit}: no prompt fits "
        "beside it; lower it"
    ]


def check_disk(values: Values, layout: Layout, model: Model | None) -> list[str]:
    """Whether the trained policies (each also in DVC's cache) and the checkpoints fit the disk."""
    if model is None:
        return []
    weights = FLOAT32 * model.num_parameters
    experiment = values["experiment"]
    cells = len(experiment["recipes"]) * len(experiment["seeds"])
    missing = cells - len(list(layout.root.glob("runs/*/*/train/policy")))
    checkpoints = (values["checkpoint"]["keep"] + 1) * TRAINING_STATE * weights
    needed = 2 * weights * max(missing, 0) + checkpoints
    root = layout.root.absolute()
    place = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed <= free:
        return []
    return [
        f"the disk of {place} has {free / GIB:.3g} GiB free, and the run needs about "
        f"{needed / GIB:.3g} GiB ({missing} trained policies, each also in DVC's cache, and "
        f"{values['checkpoint']['keep']} checkpoints): free some, run fewer recipes or seeds, or "
        "lower checkpoint.keep"
    ]
