"""Names in the documentation exist: parameters, files, modules, pages."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tasks.code.schema import schema
from tasks.common.params import Budget
from tasks.engines.settings import Cluster
from tasks.policy.settings import Finetuning, Supervised
from tasks.profile.settings import Stop
from tests.docs.pages import PAGES, ROOT, Block, inline, of
from tests.parameters import every_value

VALUES = every_value()
CLUSTER = {field.name: None for field in dataclasses.fields(Cluster)}
BUDGET = {field.name: None for field in dataclasses.fields(Budget)}
SUPERVISED = {field.name: None for field in dataclasses.fields(Supervised)}
SUPERVISED["training"] = {field.name: None for field in dataclasses.fields(Finetuning)}
KNOWN = {
    **VALUES,
    "policy": {**VALUES["policy"], "supervised": SUPERVISED},
    "engine": {**VALUES["engine"], "cluster": CLUSTER},
    "experiment": {**VALUES["experiment"], "budget": BUDGET},
    "profile": {**VALUES["profile"], "stop": dataclasses.asdict(Stop("mixed"))},
}
# The reader chooses the keys of these sections.
FREE = {"ingest.sources", "policy.supervised.sources", "verify.verifiers", "recipes", "engine.vllm"}
SUFFIXES = (".py", ".md", ".yaml", ".json", ".jsonl", ".parquet", ".txt", ".toml", ".html", ".lock")
LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#[^)]*)?\)")


def unknown_keys(value: Any, known: Any, where: str) -> Iterator[str]:
    """Yield the keys of `value` that `known` lacks, with dots."""
    if where in FREE or not isinstance(value, dict):
        return
    for key, inner in value.items():
        name = f"{where}.{key}".lstrip(".")
        if not isinstance(known, dict) or key not in known:
            yield name
        else:
            yield from unknown_keys(inner, known[key], name)


PARTS = [block for block in of("yaml") if block.caption in (None, "params.yaml")]


@pytest.mark.parametrize("block", PARTS, ids=lambda block: f"{block.page} {block.text[:20]!r}")
def test_yaml_blocks_are_parts_of_params(block: Block) -> None:
    values = yaml.safe_load(block.text)
    assert list(unknown_keys(values, KNOWN, "")) == []
    jsonschema.validate(values.get("recipes"), schema()["properties"]["recipes"])


def test_json_blocks_are_json() -> None:
    for block in of("json"):
        lines = block.text.splitlines() if block.caption else [block.text]
        assert all(json.loads(line) for line in lines), block.page


def test_dotted_parameters_exist() -> None:
    for page, text in inline():
        section, *keys = re.sub(r"(: .*|=.*)$", "", text).split(".")
        dotted = bool(keys) and all(re.fullmatch(r"[a-z_]+", key) for key in keys)
        if section not in VALUES or not dotted or text.endswith(SUFFIXES):
            continue
        known: Any = KNOWN[section]
        for key in keys:
            assert isinstance(known, dict), f"{page}: {text}"
            assert key in known, f"{page}: {text}"
            known = known[key]


def test_paths_of_the_project_exist() -> None:
    for page, text in inline():
        if re.fullmatch(r"(tasks|flows|tests|docs|examples|\.ci|\.github)/[\w./-]+", text):
            assert (ROOT / text).exists() or text == "docs/_build", f"{page}: {text}"
        if re.fullmatch(r"(tasks|flows|tests)(\.\w+)+", text):
            base = ROOT.joinpath(*text.split("."))
            assert base.is_dir() or base.with_suffix(".py").exists(), f"{page}: {text}"


def test_recipes_and_methods_in_tables_exist() -> None:
    """The first column of the methods tables names recipes."""
    for page in (ROOT / "README.md", ROOT / "docs" / "guide" / "methods.md"):
        table = page.read_text().split("| recipe |", 1 if "guide" in str(page) else 2)[-1]
        table = table.split("\n\n")[0]
        for row in table.splitlines()[2:]:
            for name in re.findall(r"`(\w+)`", row.split("|")[1]):
                assert name in VALUES["recipes"], f"{page.name}: {name}"
    num = len(set(re.findall(r"arxiv.org/abs/([\d.]+)", table)))
    assert f"the methods of {num} papers" in page.read_text()
    assert f"those of {num} papers" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for found in LINK.finditer(page.read_text()):
        target = found["target"]
        if target and not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists() or "reference/" in target, target
