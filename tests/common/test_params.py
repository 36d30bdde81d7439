"""params.yaml is read strictly, and every message names the key."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from tasks.common import params, registry
from tasks.common.params import ParamsError


@dataclass(frozen=True)
class Inner:
    unit: Literal["rollouts", "prompts"]
    size: int


@dataclass(frozen=True)
class Outer:
    rate: float
    limit: int | None
    inner: Inner
    buckets: list[int]


GOOD: dict[str, Any] = {
    "rate": 1,
    "limit": None,
    "inner": {"unit": "rollouts", "size": 4},
    "buckets": [2, 4],
}


def test_nested_sections_are_read() -> None:
    assert params.section({"outer": GOOD}, "outer", Outer) == Outer(
        1.0, None, Inner("rollouts", 4), [2, 4]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": "1e9"}, r"outer\.rate is '1e9', which is not a number"),
        ({"limit": True}, r"outer\.limit is True, which is not a whole number"),
        ({"inner": 3}, r"outer\.inner must be a mapping with the keys unit, size"),
    ],
)
def test_wrong_key_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        params.section({"outer": {**GOOD, **change}}, "outer", Outer)


@params.settings
class Defaults:
    rate: float = 0.5
    sizes: list[int] = [2, 4]  # noqa: RUF012
    inner: Inner = Inner("rollouts", 4)


def test_defaults_are_copied() -> None:
    first, second = (params.section({}, "any", Defaults) for _ in range(2))
    assert first == Defaults(0.5, [2, 4], Inner("rollouts", 4))
    first.sizes.append(8)
    assert second.sizes == [2, 4]
    assert params.section({"any": None}, "any", Defaults) == second


def test_all_problems_are_found_at_once() -> None:
    wrong = {"rat": 1, "sizes": ["2"], "inner": {"unit": "tokens"}}
    with pytest.raises(ParamsError) as raised:
        params.section({"any": wrong}, "any", Defaults)
    assert list(raised.value.problems) == [
        "any.rat is unknown; allowed: rate, sizes, inner; did you mean rate?",
        "any.sizes[0] is '2', which is not a whole number",
        "any.inner.size is missing; any.inner needs: unit, size",
        "any.inner.unit is 'tokens'; allowed: rollouts, prompts",
    ]


def test_numbers_are_read_as_dvc_reads_them_and_a_key_appears_once(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("a: {rate: 1e-4, large: 6E8, text: '1e4', name: 1e4x}\n")
    assert params.load(path) == {"a": {"rate": 1e-4, "large": 6e8, "text": "1e4", "name": "1e4x"}}
    path.write_text("a: &a {x: 1}\nb: {<<: *a, x: 2}\n")  # an override of a merge is no duplicate
    assert params.load(path)["b"] == {"x": 2}
    path.write_text("a:\n  x: 1\n  y: 2\n  x: 3\n")
    with pytest.raises(ParamsError, match=r"the key 'x' appears twice \(line 4, column 3\)"):
        params.load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"absent\.yaml does not exist: restore it"):
        params.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: !!python/object/apply:os.system ['true']",
            r"could not .*\(line 1, column 4\)$",
        ),
        ("a: [1", r"params\.yaml is not YAML"),
        ("[" * 100_000, "RecursionError"),
        ("a: &a [*a]", "RecursionError"),
    ],
)
def test_invalid_unsafe_or_recursive_yaml_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match=message) as raised:
        params.load(path)
    assert "\n" not in str(raised.value)


def test_infinite_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("train:\n  rates: [1.0, .inf]\n")
    with pytest.raises(ParamsError, match=r"params\.yaml: train\.rates\.1 is inf; give a finite"):
        params.load(path)


def test_settings_of_a_method_are_checked_by_name() -> None:
    def method(array: object, *, keep: int, seed: int) -> tuple[object, int, int]:
        return array, keep, seed

    assert registry.bind(method, {"keep": 4, "seed": 1}, "select")("x") == ("x", 4, 1)
    with pytest.raises(
        ParamsError, match=r"select\.kep is unknown; allowed: keep, seed; did you mean keep\?"
    ):
        registry.bind(method, {"kep": 4, "seed": 1}, "select")
    with pytest.raises(ParamsError, match=r"select\.seed is missing"):
        registry.bind(method, {"keep": 4}, "select")


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "-a", ".a", "", "a b", "a\n", "a.b", "x" * 65, "ä", "$(id)", 7, None],
)
def test_recipe_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: object) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({"recipes": {name: {"allocate": {}, "train": {}}}}))
    with pytest.raises(ParamsError, match="a key of recipes is .*it names folders and stages"):
        params.load(path)
    path.write_text(yaml.safe_dump({"experiment": {"recipes": ["grpo", name], "seeds": [0]}}))
    with pytest.raises(ParamsError, match="a name in experiment.recipes is"):
        params.load(path)


def test_valid_recipes_and_seeds_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    values = {"experiment": {"recipes": ["sgpo_0", "Grpo-2", "4_updates"], "seeds": [0, 12]}}
    path.write_text(yaml.safe_dump(values))
    assert params.load(path) == values


@pytest.mark.parametrize("seed", [-1, "$(id)", "0", 1.5, True, None, "../x"])
def test_invalid_seed_is_named(tmp_path: Path, seed: object) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({"experiment": {"recipes": ["grpo"], "seeds": [0, seed]}}))
    with pytest.raises(ParamsError, match=re.escape(f"experiment.seeds has {str(seed)!r}; a seed")):
        params.load(path)
