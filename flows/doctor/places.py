"""Check that the pipeline's inputs and outputs exist, are readable or writable, and fit the disk.

No policy is downloaded: if it is on the Hugging Face hub, this machine's cache is checked. Only the
first rows of a source are read."""

import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from flows.serve import server
from tasks.common import recipes
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, require_writable
from tasks.common.layout import Layout
from tasks.common.locations import open_location, reaching
from tasks.common.params import ParamsError, listed, meant, section
from tasks.grading.loading import load as load_verifier
from tasks.grading.settings import Verify
from tasks.ingest.candidates import MARKER, Row
from tasks.ingest.files.formats import Rejection
from tasks.ingest.reading import rows, sources
from tasks.ingest.settings import Ingest
from tasks.models.folder import (
    DATA_FILES,
    as_mapping,
    check_folder,
    check_tokenizer,
    has_chat_template,
    num_parameters,
)
from tasks.policy.settings import HUB as POLICY_HUB
from tasks.policy.settings import Policy
from tasks.policy.source import locate
from tasks.train import needs

Values = Mapping[str, Any]
GIB = 2**30
NUM_ROWS = 20  # rows read per source
FLOAT32 = 4  # bytes
TRAINING_STATE = 3  # weights and AdamW's two moments


@dataclass(frozen=True)
class Model:
    """The known sizes of a policy before it is loaded; `vocab_size` and `max_length` are None if
    its configuration lacks them."""

    num_parameters: int
    vocab_size: int | None
    max_length: int | None
    num_layers: int = 0  # 0: unknown


def model_folder(source: str) -> Path | None:
    """Return the folder of a local policy, which may not exist, or of a hub policy in the cache.
    Return None for `tiny`, for a bucket, for a GGUF file, which the stage converts, and for a hub
    policy if the stage would fetch files."""
    if (match := POLICY_HUB.fullmatch(source)) is None:
        is_elsewhere = "://" in source or source == "tiny" or Policy(source).is_converted
        return None if is_elsewhere else Path(source).expanduser()
    with suppress(LocalEntryNotFoundError):
        found = snapshot_download(
            match["name"],
            revision=match["revision"],
            allow_patterns=list(DATA_FILES),  # others, such as a README, are never fetched
            local_files_only=True,
        )
        return Path(found) if constants.HF_HUB_OFFLINE or not faults(Path(found)) else None
    return None


def check_model(values: Values) -> list[str]:
    """Return the faults of the policy's folder, or of `policy.source` if it would be fetched."""
    try:
        source = section(values, "policy", Policy).source
    except ParamsError:  # reported with the other parameters
        return []
    if source == "tiny" or source.startswith("s3://"):
        return [] if source == "tiny" else raised(bucket_has, source)
    if Policy(source).is_converted:
        return raised(locate, source)
    folder = model_folder(source)
    if folder is None:  # the stage fetches it, unless offline
        return [
            f"policy.source: {source} is not in the hub's cache ({constants.HF_HUB_CACHE}) and "
            "HF_HUB_OFFLINE is set: unset it, or set a local path"
        ] * constants.HF_HUB_OFFLINE
    if not folder.is_dir():
        guess = "; did you mean tiny?" if meant(source, ["tiny"]) else near(folder)
        return [f"policy.source: {folder} is not a folder{guess}"]
    return [f"policy.source: {fault}" for fault in faults(folder)]


def check_teachers(values: Values) -> list[str]:
    """Return the faults of the teacher folders that the experiment's recipes name."""
    found = []
    for name in values["experiment"]["recipes"]:
        folder = needs.read_train(recipes.recipe(values, name)["train"]).reference.folder
        if folder is not None:
            prefix = f"recipe '{name}': train.reference.source"
            found += [f"{prefix}: {fault}" for fault in faults(folder)]
    return found


def faults(folder: Path) -> list[str]:
    """Return at most one fault: the first that makes a folder unusable as a policy."""
    return raised(check_folder, folder) or raised(check_tokenizer, folder)


def raised(check: Callable[..., object], *arguments: Any) -> list[str]:
    """Call a check that raises at the first problem; return its error, or an empty list."""
    try:
        check(*arguments)
    except (ParamsError, ArtifactError) as error:
        return [str(error)]
    return []


def near(path: Path) -> str:
    """Return a hint for a missing path: a similar name beside it, or a missing parent."""
    if path.exists():
        return ""
    with suppress(OSError):
        guess = meant(path.name, [other.name for other in path.parent.iterdir()])
        if guess:
            return f"; did you mean {path.parent / guess}?"
    return "" if path.parent.is_dir() else f"; {path.parent} does not exist either"


def check_data(values: Values, layout: Layout) -> tuple[list[str], list[str]]:
    """Read the first few rows of every source as `ingest` does, load their verifiers, and return
    (errors, remarks). A remote source that cannot be read is an error only if the prompts have not
    been ingested yet."""
    errors, remarks, examined = list[str](), list[str](), list[Row | Rejection]()
    settings = section(values, "ingest", Ingest)
    for number, source in enumerate(sources(settings.sources)):
        location = str(source.settings.get("path", ""))
        try:
            first = list(rows(number, source, settings.max_prompt_characters, None, NUM_ROWS))
            examined += first
            rejected = [one for one in first if isinstance(one, Rejection)]
            if rejected and rejected[0].reason == "too_large":
                remarks.append(
                    f"ingest.sources[{number}] was not examined: {rejected[0].detail}; to examine "
                    "it, run `python -m tasks.ingest --dry-run`"
                )
            elif len(rejected) == len(first):
                remarks.append(
                    f"ingest.sources[{number}]: none of its first {len(first)} rows can be used: "
                    f"{rejected[-1].detail}"
                )
        except (ParamsError, ArtifactError) as error:
            is_remote = "://" in location
            is_here = is_remote and layout.prompts("train").is_file()
            hint = "" if is_remote or not location else near(Path(location).expanduser())
            (remarks if is_here else errors).append(f"ingest.sources[{number}]: {error}{hint}")
    needing = [name for name in values.get("recipes", {}) if needs_solutions(values, name)]
    usable = [row for row in examined if isinstance(row, Row)]
    configured = section(values, "verify", Verify).verifiers  # checked with the other parameters
    for name in sorted({row.verifier for row in usable} - {*configured}):
        errors += raised(load_verifier, name, configured)
    if needing and usable and not any(row.solution for row in usable):
        remarks.append(
            f"recipe {listed(needing)}: train.warm_start.data is solutions, but the first rows of "
            "the sources have no worked solution: name its field as `solution` in the settings of "
            "a source (preset mapping), or set data: profile"
        )
    return errors, remarks


def check_splits(values: Values) -> list[str]:
    """Return a fault for each split without prompts on which stages measure a policy."""
    return [
        f"ingest.splits.{name} is 0, but policies are measured on it: set it to at least 1"
        for name in ("validation", "test")
        if values["ingest"]["splits"][name] == 0
    ]


def needs_solutions(values: Values, recipe: str) -> bool:
    """Return whether a recipe's warm start imitates worked solutions."""
    warm_start = recipes.recipe(values, recipe)["train"].get("warm_start") or {}
    return warm_start.get("data") == "solutions"


def policy_has_template(values: Values) -> bool | None:
    """Return whether the policy has a chat template, or None if it is not on this machine yet."""
    source = values["policy"]["source"]
    folder = model_folder(source)
    if source != "tiny" and (folder is None or not folder.is_dir()):
        return None
    with suppress(ArtifactError):  # another check reports a broken file
        return folder is not None and has_chat_template(folder)
    return None


def check_chat(values: Values) -> tuple[list[str], list[str]]:
    """Return errors for sources that are incompatible with the policy's chat template, and remarks
    for sources that do not use it."""
    errors, remarks, has_template = list[str](), list[str](), policy_has_template(values)
    for number, entry in enumerate(values["ingest"]["sources"]):
        own = "{prompt}" if entry.get("raw") else entry.get("prompt_template")
        if entry.get("system") is not None and has_template is False:
            errors.append(
                f"ingest.sources[{number}].system: the policy has no chat template, so there are "
                "no messages: write the text into prompt_template instead"
            )
        elif own is not None and has_template and not MARKER.search(own):
            remarks.append(
                f"ingest.sources[{number}]: prompts are plain text, and the policy's chat template "
                "is not used: remove raw or prompt_template if the policy was trained on chats"
            )
    return errors, remarks


def bucket_has(location: str) -> None:
    """Raise ArtifactError if a bucket has nothing at `location`, or does not respond."""
    files, path = open_location(location)
    with reaching(location):
        if not files.exists(path):
            raise ArtifactError(f"{location}: there is no such file or folder in the bucket")


def check_writable(values: Values, layout: Layout) -> list[str]:
    """Return why the data root, the store or the record cannot be written."""
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
    """Raise ArtifactError if writing an object below `location` fails."""
    files, path = open_location(location)
    name = f"{path}/.doctor-{os.getpid()}"
    with reaching(location):
        files.pipe_file(name, b"")
        files.rm_file(name)


def silent_tracking(values: Values) -> list[str]:
    """Return a remark if the tracking server does not respond: records will wait in files."""
    uri = values["tracking"]["uri"] or ""
    if not uri.startswith(("http://", "https://")):
        return []
    status = server.status(uri, "health")
    what = "does not respond" if status is None else f"responds with {status}"
    return [f"tracking.uri: the server {what}; records will wait in files"] * (status != 200)


def describe_model(values: Values, layout: Layout) -> Model | None:
    """Return the sizes of the policy: from its card if that has the same source, else from its
    files. Return None if the policy is not on this machine yet, or has no weights."""
    source = values["policy"]["source"]
    with suppress(ArtifactError, KeyError, TypeError, OSError):
        card = read_checked(layout.policy_card)
        if card["source"] == source:
            return Model(card["num_parameters"], card["vocab_size"], card["max_length"])
    if Policy(source).is_converted:
        with suppress(ArtifactError, OSError, ValueError, IndexError, KeyError):
            return of_gguf(locate(source))
    folder = model_folder(source)
    if folder is None:
        return None
    with suppress(ArtifactError, OSError, ValueError):
        config = as_mapping(folder / "config.json")
        config |= config.get("text_config") or {}
        limit = config.get("max_position_embeddings", config.get("n_positions"))  # GPT-2's name
        if number := num_parameters(folder):  # 0 for a folder without weights in safetensors form
            layers = config.get("num_hidden_layers", config.get("n_layer"))
            return Model(number, config.get("vocab_size"), limit, layers or 0)
    return None


def of_gguf(path: Path) -> Model:
    """Return the sizes in the header of a GGUF file."""
    from gguf import GGUFReader  # takes a second

    reader = GGUFReader(path)
    name = reader.fields["general.architecture"].contents()
    length, layers = (
        int(reader.fields[f"{name}.{key}"].contents()) for key in ("context_length", "block_count")
    )
    vocabulary = reader.fields["tokenizer.ggml.tokens"]
    return Model(
        sum(int(t.n_elements) for t in reader.tensors), len(vocabulary.data), length, layers
    )


def check_context(values: Values, model: Model | None) -> list[str]:
    """Return a fault if `sampling.max_tokens` leaves no room for a prompt in the context."""
    limit, requested = model.max_length if model else None, values["sampling"]["max_tokens"]
    if limit is None or requested < limit:
        return []
    return [
        f"sampling.max_tokens is {requested}, but the policy's context is {limit}: no prompt would "
        "fit; lower it"
    ]


def check_disk(values: Values, layout: Layout, model: Model | None) -> list[str]:
    """Return a fault if the disk lacks room for policies (also in DVC's cache) and checkpoints."""
    if model is None:
        return []
    weights = FLOAT32 * model.num_parameters
    experiment = values["experiment"]
    cells = itertools.product(experiment["recipes"], experiment["seeds"])
    missing = sum(not (layout.train(*cell) / "policy").exists() for cell in cells)
    checkpoints = (values["checkpoint"]["keep"] + 1) * TRAINING_STATE * weights
    needed = 2 * weights * missing + checkpoints
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
