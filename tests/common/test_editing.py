"""Values of a YAML file are edited, and its comments stay."""

import pytest
import yaml

from tasks.common.config.editing import set_values
from tasks.common.params import ParamsError, parsed

TEXT = """\
# first
a:              # of a
  b: 1          # of b
  c: [x, y]     # of c
  d:            # of d
    - e: 1
      f: {g: 2}   # of f
    - e: 3
  # after d

h: text   # last
"""


def test_values_change_and_comments_stay() -> None:
    text = set_values(TEXT, {"a.b": 22, "a.c": ["z"], "h": "hf://org/name@main"})
    assert yaml.safe_load(text)["a"]["b"] == 22
    assert "  c: [z]     # of c\n" in text
    assert 'h: "hf://org/name@main"   # last\n' in text
    assert [line.partition("#")[2] for line in text.splitlines()] == [
        line.partition("#")[2] for line in TEXT.splitlines()
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3e13, "3.0e13"),
        (1.25e-6, "1.25e-6"),
        (-1234567.5, "-1.2345675e6"),
        (999999.0, "999999.0"),
        (0.001, "0.001"),
        (0.0, "0.0"),
        ({"a": [1e6, True], "b c": None}, '{a: [1.0e6, true], "b c": null}'),
    ],
)
def test_values_are_written_readably(value: object, written: str) -> None:
    assert set_values("a: 1\n", {"a": value}) == f"a: {written}\n"
    assert parsed(written) == value
    assert not isinstance(value, float) or isinstance(parsed(written), float)


def test_list_of_mappings_becomes_a_block() -> None:
    text = set_values(TEXT, {"a.d": [{"e": 4, "f": {"g": "a b"}}, {"e": 5}]})
    assert text.endswith(
        "  d:            # of d\n"
        '    - e: 4\n      f: {g: "a b"}\n    - e: 5\n'
        "  # after d\n\nh: text   # last\n"
    )
    left = "a:\n  b:  # of b\n  - 1\n  c: 2\n"  # as yaml.safe_dump writes a list
    assert set_values(left, {"a.b": [3]}) == "a:\n  b:  # of b\n    [3]\n  c: 2\n"


@pytest.mark.parametrize("value", ["no", "1", "1e5", "null", "on", "x: y", "# x", "a-b", "", "é"])
def test_words_are_read_back_unchanged(value: str) -> None:
    assert parsed(set_values(TEXT, {"h": value}))["h"] == value


def test_missing_key_is_added_to_its_mapping() -> None:
    text = set_values(TEXT, {"a.z.y": 1, "n.m": "x", "o": 2})
    found = yaml.safe_load(text)
    assert (found["a"]["z"], found["n"], found["o"]) == ({"y": 1}, {"m": "x"}, 2)
    assert found["a"]["d"] == yaml.safe_load(TEXT)["a"]["d"]
    assert [line for line in text.splitlines() if "#" in line] == [
        line for line in TEXT.splitlines() if "#" in line
    ]
    assert set_values("a: {b: 1}  # of a\n", {"a.c": 2}) == "a: {b: 1, c: 2}  # of a\n"
    with pytest.raises(ParamsError, match=r"h is not a mapping, so h\.b cannot be set"):
        set_values(TEXT, {"h.b": 1})
    for text in ("a: |\n  x\nb: 1\n", "b: &x [1]\na: *x\nc: *x\n"):
        with pytest.raises(ParamsError, match="a cannot be set in this file: set it by hand: y"):
            set_values(text, {"a": "y"})


def test_key_without_a_value_gets_one() -> None:
    text = "store:\n  location:   # null: under the data root\n  uri:\nempty:\n  # a: 1\nz: ~\n"
    after = set_values(text, dict.fromkeys(("store.location", "store.uri", "empty.a.b", "z.c"), 1))
    store = {"location": 1, "uri": 1}
    assert yaml.safe_load(after) == {"store": store, "empty": {"a": {"b": 1}}, "z": {"c": 1}}
    assert all(words in after for words in ("# null: under the data root", "  # a: 1\n"))
