"""Policies as logged models, and the aliases `candidate` and `champion` that point to them.

A model of at most `tracking.max_weights_gb` is uploaded in the layout of MLflow's transformers
models, so that `mlflow.transformers.load_model("models:/winnow@champion")` loads it. The layout is
written here from the existing files, because `mlflow.transformers.log_model` would load the weights
and request a model card from the Hugging Face Hub. For a larger model only a pointer is recorded:
the tag `path`, the location of its files."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, read_json, temporary_folder
from tasks.common.tracking.journal import MAX_TAG, Event, shorten
from tasks.common.tracking.runs import TrackedRun, producer
from tasks.common.tracking.writers import write_output, write_tags

logger = logging.getLogger(__name__)

ALIASES = ("candidate", "champion")
POINTER = "at `path`"  # value of the tag `weights` if they are not uploaded


def write_model(run: TrackedRun, event: Event) -> None:
    """Log a policy, with its weights if they are small enough."""
    from mlflow.entities import LoggedModelOutput

    weights = "uploaded" if event["weights"] else POINTER
    tags = {
        "digest": event["digest"],
        "path": event["path"],
        "key": event["key"],
        "weights": weights,
    }
    name = "".join(
        letter if letter.isalnum() or letter in "-_" else "-" for letter in event["name"]
    )
    model = run.client.create_logged_model(run.experiment_id, name, run.run_id, tags)
    try:
        if event["weights"]:
            upload(run, model.model_id, Path(event["path"]))
    except (ArtifactError, FileNotFoundError) as error:  # a fault of its files, not the server
        logger.warning("the weights of %s are not uploaded: %s", event["name"], error)
        run.client.set_logged_model_tags(model.model_id, {"weights": POINTER})
    run.client.finalize_logged_model(model.model_id, "READY")
    run.client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, 0)])
    write_output(run, event)


def upload(run: TrackedRun, model_id: str, policy: Path) -> None:
    """Upload a policy's files in the layout of MLflow's transformers models. The files are linked
    into place, not copied."""
    from mlflow.models import Model

    with temporary_folder(None, "winnow-model") as folder:
        for part in ("model", "components/tokenizer"):
            (folder / part).mkdir(parents=True)
        for path in sorted(path for path in policy.iterdir() if path.is_file()):
            os.symlink(path, folder / "model" / path.name)
            if path.suffix != ".safetensors":  # MLflow reads no weights from this folder
                os.symlink(path, folder / "components" / "tokenizer" / path.name)
        model = Model(model_id=model_id, run_id=run.run_id)
        model.add_flavor("transformers", **flavor(policy))
        model.save(str(folder / "MLmodel"))
        run.client.log_model_artifacts(model_id, str(folder))


def flavor(policy: Path) -> dict[str, Any]:
    """Return the settings with which MLflow loads a policy as a pipeline of transformers."""
    config = read_json(policy / "config.json")
    tokenizer = policy / "tokenizer_config.json"
    named = read_json(tokenizer).get("tokenizer_class") if tokenizer.exists() else None
    return {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": config["architectures"][0],
        "source_model_name": policy.name,
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": named or "PreTrainedTokenizerFast",
        "transformers_version": config.get("transformers_version"),
        "code": None,
    }


def write_champion(run: TrackedRun, event: Event) -> None:
    """Apply the report's decision: register the policies whose training runs wrote the evidence,
    under their aliases.

    If such a run was never recorded here, remove the alias, which points to an older policy. The
    model has the experiment's name, with `-` for what MLflow does not allow or search."""
    client = run.client
    name = re.sub("[/:']", "-", client.get_experiment(run.experiment_id).name)
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    write_tags(run, {"values": {"champion.why": shorten(event["why"], MAX_TAG)}})
    found = {"champion": event["evidence"], "candidate": event.get("candidate")}
    for alias in ALIASES:
        move_alias(run, name, alias, found[alias])


def move_alias(run: TrackedRun, name: str, alias: str, policy: dict[str, str] | None) -> None:
    """Set an alias to the policy whose run wrote `policy` (key, digest); delete it if no run
    did, or if that run has no model."""
    client = run.client
    run_id = policy and producer(client, run.experiment_id, policy["key"], policy["digest"])
    models = run_id and client.search_logged_models(
        [run.experiment_id], f"source_run_id = '{run_id}'"
    )
    made_by = {f"{alias}.run": run_id} if run_id else {}
    write_tags(run, {"values": {alias: policy["key"] if policy else "none", **made_by}})
    if models:
        client.set_registered_model_alias(name, alias, version_of(run, name, models[0]))
    else:
        client.delete_registered_model_alias(name, alias)


def version_of(run: TrackedRun, name: str, model: Any) -> str:
    """Return the registered version of a logged model. Register it if no version has its digest."""
    tags = {k: model.tags[k] for k in model.tags if k != "key"}
    for known in run.client.search_model_versions(f"name = '{name}'"):
        if all(known.tags.get(key) == tags[key] for key in ("digest", "weights")):
            return str(known.version)
    source, run_id = model.artifact_location, model.source_run_id
    made = run.client.create_model_version(name, source, run_id, tags, model_id=model.model_id)
    return str(made.version)
