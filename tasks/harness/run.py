"""Run tasks of lm-evaluation-harness on a policy, one by one, and record each when it is done.

The policy is loaded by the harness itself (its models `hf` and `vllm`), from the files that any
Hugging Face program reads, and not by one of our engines: the numbers must be comparable with
published ones. A task with a record is not run again."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tasks.common import params
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import ArtifactError, causes
from tasks.common.layout import Layout
from tasks.common.params import meant
from tasks.engines.devices import first_gpus, held
from tasks.engines.loading import engine_name
from tasks.engines.settings import EngineSettings
from tasks.harness import files
from tasks.harness.records import Record, Subject, path_of
from tasks.models.policy import Policy, load_tokenizer, read_policy, read_trained, torch_device

logger = logging.getLogger(__name__)

INSTALL = 'python -m pip install --constraint requirements.txt --editable ".[eval]"'
BACKENDS = ("hf", "vllm")
COUNTS = ("alias", "sample_len")  # not metrics, although the harness lists them
BATCH_SIZE = 16  # for hf on a CPU; otherwise the harness chooses it


@dataclass(frozen=True)
class Asked:
    """The request. If None, `backend` follows `engine.name`, `batch_size` is automatic, `limit` is
    all problems, `chat_template` is true if one exists, and the others are the task's defaults."""

    tasks: list[str]
    limit: int | None
    include: str | None
    trust_tasks: bool
    few_shot: int | None
    max_tokens: int | None
    chat_template: bool | None
    backend: str | None
    batch_size: int | None


@dataclass(frozen=True)
class Index:
    """The available tasks, and the digest of the user's own files among them."""

    manager: Any
    include: Path | None
    fingerprint: str | None

    def names(self, asked: list[str]) -> list[str]:
        """Return the requested tasks and groups, with each tag replaced by its tasks. Raise
        ArtifactError for an unknown name, and for a task that runs programs written by a policy."""
        known, found = self.manager.task_index, list[str]()
        for name in asked:
            if name not in known:
                guess = meant(name, known)
                hint = f"; did you mean {guess}?" if guess else ""
                raise ArtifactError(f"there is no task {name!r} in the harness{hint}")
            members = self.members(name)
            for task in members:
                if (known[task].cfg or {}).get("unsafe_code"):
                    of = "" if task == name else f" (of {name})"
                    raise ArtifactError(
                        f"{task}{of} runs programs that the policy writes, outside of any "
                        "sandbox: it is refused. The verifier `code` uses a sandbox"
                    )
            found += members[1:] if known[name].kind.name == "TAG" else [name]
        return list(dict.fromkeys(found))

    def members(self, name: str) -> list[str]:
        """Return a name, and for a group or a tag all names in it."""
        known, found = self.manager.task_index, [name]
        for one in found:
            entry = known[one]
            inside = entry.tags if entry.kind.name == "TAG" else files.named(entry.cfg, "task")
            found += sorted(({*inside} - {*found}) & known.keys())
        return found

    def source(self, name: str) -> str | None:
        """Return the digest of the user's task files if the task, or one of the group, is one of
        them; None for tasks of the harness, which the harness's version identifies."""
        paths = (self.manager.task_index[each].yaml_path for each in self.members(name))
        is_own = self.include and any(p and Path(p).is_relative_to(self.include) for p in paths)
        return self.fingerprint if is_own else None


def open_index(asked: list[str], include: str | None, trust_tasks: bool) -> Index:
    """Return the tasks of the harness and of the folder `include`. The harness's own tasks, some
    ten thousand files, are read only if one is requested. Raise ArtifactError if the harness is not
    installed, or the folder is not trusted."""
    if find_spec("lm_eval") is None:
        raise ArtifactError(f"lm_eval is not installed; install it with: {INSTALL}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    harness, tasks = import_module("lm_eval"), import_module("lm_eval.tasks")
    fingerprint, needs_all = None, True
    folder = None if include is None else Path(include).resolve()
    if folder is not None:
        if not trust_tasks:
            raise ArtifactError(
                f"the task files of {include} can run code (!function, metrics, pickled tables): "
                "read them, and run the command with --trust-tasks"
            )
        own = files.task_files(folder, Path(str(harness.__file__)).resolve().parent)
        fingerprint = files.fingerprint(own)
        manager = tasks.TaskManager(include_path=folder, include_defaults=False)
        needs_all = not set(asked) <= set(manager.all_subtasks)
    sandbox_templates(import_module("lm_eval.utils"))
    if needs_all:
        manager = tasks.TaskManager(include_path=folder)
    return Index(manager, folder, fingerprint)


def sandbox_templates(utils: Any) -> None:
    """Make the harness render prompts in jinja2's sandbox, because a template in the harness's
    default environment can reach all of Python."""
    plain = utils.env
    utils.env = ImmutableSandboxedEnvironment(
        undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    utils.env.filters.update(plain.filters)


def open_cell(layout: Layout, cell: Subject) -> Policy:
    """Return the policy of a cell. Raise ArtifactError if it has not been trained."""
    if cell.trained is None:
        return read_policy(layout)
    folder = layout.train(*cell.trained) / "policy"
    if not folder.is_dir():
        raise ArtifactError(f"{cell.name} has no {folder}: create it with `winnow run`")
    return read_trained(layout, *cell.trained)


class Harness:
    """Runs the requested tasks on one policy. The policy is loaded for the first task to run."""

    def __init__(
        self, layout: Layout, values: Mapping[str, Any], cell: Subject, asked: Asked, index: Index
    ) -> None:
        self.layout, self.cell, self.asked, self.index = layout, cell, asked, index
        self.engine = params.section(dict(values), "engine", EngineSettings)
        self.policy = open_cell(layout, cell)
        self.device = str(torch_device(self.engine.device))
        name = engine_name(self.engine)
        self.backend = asked.backend or (name if name in BACKENDS else "hf")  # hf for servers
        self.chat_template = asked.chat_template
        if self.chat_template is None:
            tokenizer = load_tokenizer(
                self.policy.folder, trust_remote_code=self.policy.trust_remote_code
            )
            self.chat_template = tokenizer.chat_template is not None
        self.model: Any = None

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings with which a task is measured."""
        return {
            "backend": self.backend,
            "dtype": self.engine.dtype,
            "limit": self.asked.limit,
            "few_shot": self.asked.few_shot,
            "max_tokens": self.asked.max_tokens,
            "chat_template": self.chat_template,
            "task_files": self.index.source(task),
            **(self.engine.altering if self.backend == "vllm" else {}),
        }

    def path(self, task: str) -> Path:
        """Return the path of a task's record."""
        key = {
            "policy": self.policy.digest,
            "settings": self.settings(task),
            "versions": versions(self.backend),
        }
        return path_of(self.layout, self.cell, task, key)

    def run(self, task: str) -> Record:
        """Measure the policy on one task, and write the record."""
        started = time.perf_counter()
        results = self.evaluate(task)
        record = {
            "cell": self.cell.name,
            "recipe": self.cell.recipe,
            "seed": self.cell.seed,
            "policy": self.policy.digest,
            "task": task,
            "settings": self.settings(task),
            "versions": versions(self.backend),
            "seconds": round(time.perf_counter() - started, 1),
            "is_told": False,
            **measured(task, results),
        }
        write_checked(self.path(task), record)
        return record

    def evaluate(self, task: str) -> Mapping[str, Any]:
        """Return the harness's results for one task. Raise ArtifactError if it fails."""
        limit = self.asked.max_tokens
        try:
            found = import_module("lm_eval").simple_evaluate(
                model=self.loaded(),
                tasks=[task],
                num_fewshot=self.asked.few_shot,
                limit=self.asked.limit,
                apply_chat_template=self.chat_template,
                gen_kwargs=None if limit is None else {"max_gen_toks": limit},
                task_manager=self.index.manager,
                log_samples=False,
            )
        except Exception as error:  # of many libraries, and of the user's own functions
            texts = [f"{type(one).__name__}: {str(one).strip()}" for one in causes(error)]
            reasons = "; ".join(text.partition("\n")[0].rstrip(": ") for text in texts)
            raise ArtifactError(f"{task}: {reasons}") from error
        return dict(found)

    def loaded(self) -> Any:
        """Return the policy as a model of the harness, loaded on the first call."""
        if self.model is None:
            torch.set_num_threads(self.engine.threads)
            registry = import_module("lm_eval.api.registry")
            size: int | str = "auto"
            if self.backend == "hf" and self.device == "cpu":
                size = BATCH_SIZE
            self.model = registry.get_model(self.backend).create_from_arg_obj(
                {
                    "pretrained": str(self.policy.folder),
                    "dtype": self.engine.dtype,
                    "trust_remote_code": self.policy.trust_remote_code,
                    **(self.engine.vllm if self.backend == "vllm" else {}),
                },
                {"batch_size": self.asked.batch_size or size, "device": self.device},
            )
        return self.model


def versions(backend: str) -> dict[str, str]:
    """Return the versions of the packages that compute the numbers."""
    modules = ("lm_eval", "torch", "vllm" if backend == "vllm" else "transformers")
    packages = metadata.packages_distributions()  # by the modules that they provide
    return {name: metadata.version(packages[name][0]) for name in modules}


def measured(task: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record that comes from the harness's results: the metrics of the task or
    group, the metrics of a group's tasks, and the number of problems."""
    named = {**results["results"], **results.get("groups", {})}
    samples = results["n-samples"]
    return {
        "task_version": results.get("versions", {}).get(task),
        "metrics": metrics(named.get(task, {})),
        "subtasks": {name: metrics(named[name]) for name in sorted(named) if name != task},
        "num_samples": sum(count["effective"] for count in samples.values()),
    }


def metrics(values: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the metrics with their standard errors: `exact_match,strict-match` is renamed
    `exact_match/strict-match`; the filter `none` is omitted from the name."""
    found = {}
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if name.endswith("_stderr") or name in COUNTS or not is_number(value):
            continue
        error: Any = values.get(f"{name}_stderr,{kind}")
        found[name if kind in ("", "none") else f"{name}/{kind}"] = {
            "value": float(value),
            "stderr": float(error) if is_number(error) else None,
        }
    return found


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number. The harness may write N/A instead."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def measure(
    layout: Layout, values: Mapping[str, Any], cells: list[Subject], asked: Asked
) -> Iterator[tuple[Subject, Path, Record]]:
    """Yield (cell, path, record) for every cell and task. Run only tasks without a record, and lock
    the GPUs meanwhile, as stages do."""
    index = open_index(asked.tasks, asked.include, asked.trust_tasks)
    tasks = index.names(asked.tasks)
    for cell in cells:
        harness = Harness(layout, values, cell, asked, index)
        paths = {task: harness.path(task) for task in tasks}
        is_done = all(path.exists() for path in paths.values())
        num_gpus = harness.engine.num_parts if harness.backend == "vllm" else 1
        with held(first_gpus(torch.device(harness.device), 0 if is_done else num_gpus)):
            for task, path in paths.items():
                if path.exists():
                    logger.info("%s on %s: already measured", cell.name, task)
                yield cell, path, read_checked(path) if path.exists() else harness.run(task)
