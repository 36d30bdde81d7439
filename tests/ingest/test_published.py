"""Every published set by its name: on real rows if available, else on rows with its published
columns."""

import json
from pathlib import Path

import pytest

from tasks.common.params import ParamsError
from tasks.ingest.sources.published import SETS
from tests.ingest.helpers import found, lines, preset, sources

REAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "dapo_math_17k": ("dapo_math.parquet", ("34", "113", "-3", "3")),
    "deepscaler_verl": (
        "deepscaler_verl.parquet",
        ("-\\frac{\\sqrt{3}}{3}", "6", "13", "\\frac{71}{8}"),
    ),
    "math_500_verl": ("math500_verl.parquet", (r"\left( 3, \frac{\pi}{2} \right)",)),
    "aime_verl": ("skywork_verl.parquet", ("204", "025", "809", "116")),
    "orz_test": ("orz.json", (r"\left( 3, \frac{\pi}{2} \right)", "p - q")),
    "agentica_math": ("agentica_train_math.json", ("0", "98", "4", "17")),
    "olympiadbench_agentica": ("agentica_olympiad.json", ("2", r"$\frac{1}{2 n+2}$")),
    "limr": ("limr.json", ("118", "5", "30", "1")),
    "math_500_columns": ("prime_math500.json", ("4", "[-2,7]", r"\frac{11}{2}", "3")),
    "olympiadbench": ("olympiadbench.jsonl", ("2", r"$\frac{1}{2 n+2}$", "$2^{1009}$", "2")),
    "asdiv": ("asdiv.jsonl", ("9 (apples)", "15 (balls)")),
    "aqua": ("aqua.jsonl", ("A", "E", "A")),
    "gaokao_math_qa": ("gaokao_math_qa.jsonl", ("D", "C", "B", "B")),
    "mmlu": ("mmlu_stem.jsonl", ("C", "C", "A", "B")),
    "sat_math": ("sat_math.jsonl", ("A", "A", "C", "A")),
    "mgsm": ("mgsm_zh.jsonl", ("18", "3")),
    "minerva": ("minerva_math.jsonl", ("1.6", "4.5e33")),
    "ocw": ("ocw.jsonl", ("1.6", "4.5e33", "41.8")),
    "carp_en": ("carp_en.jsonl", ("b ^ { 2 } - 9 a ^ { 2 }", "20")),
    "cmath": ("cmath.jsonl", ("9", "68", "24", "92")),
    "gsm_hard": ("gsm_hard.jsonl", ("-9867630", "3431580", "322886700")),
    "mawps": ("mawps.jsonl", ("43", "26", "135", "6")),
    "math_500": ("math500.jsonl", (r"\left( 3, \frac{\pi}{2} \right)", "p - q")),
    "amc": ("prime_amc.jsonl", ("142", "144", "81", "4")),
}
"""Of each set a file of four real rows, and its first golds."""


@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_set_with_real_rows(name: str, real_data: Path) -> None:
    file, golds = REAL[name]
    kept, rejected = found(preset("published", real_data / "forms" / file, set=name))
    assert (len(kept), rejected) == (4, [])
    assert tuple(row.answer for row in kept)[: len(golds)] == golds
    assert all(row.source.split("/")[0] == name and len(row.question) > 8 for row in kept)


@pytest.mark.real_data
def test_real_options_are_shown_as_lines(real_data: Path) -> None:
    kept, _ = found(preset("published", real_data / "forms" / "aqua.jsonl", set="aqua"))
    assert kept[0].prompt.splitlines()[-1] == "E. None of these"
    agieval = real_data / "forms" / "agieval_gaokao_mathqa.jsonl"
    kept, _ = found(preset("published", agieval, set="gaokao_math_qa"))
    assert kept[1].prompt.endswith("A. $-1$\nB. 1\nC. $-3$\nD. 3")


@pytest.mark.real_data
def test_question_of_deepscaler_excludes_its_instruction(real_data: Path) -> None:
    path = real_data / "forms" / "deepscaler_verl.parquet"
    kept, _ = found(preset("published", path, set="deepscaler_verl"))
    assert kept[1].question.startswith("The number of white balls")
    assert json.loads(kept[1].messages or "")[0]["role"] == "system"


FILE = Path(__file__).with_name("published.jsonl")
COLUMNS = {case["set"]: case for case in map(json.loads, FILE.read_text().splitlines())}
"""Of each set without real rows: a row with its columns, its prompt, gold, level, and the part of
the source after the set's name."""


@pytest.mark.parametrize("name", COLUMNS)
def test_set_with_published_columns(name: str, tmp_path: Path) -> None:
    case = COLUMNS[name]
    (kept,), _ = found(preset("published", lines(tmp_path / "a.jsonl", case["row"]), set=name))
    assert (kept.level, kept.source) == (case["level"], name + case["origin"])
    if name == "gpqa":  # its options are shuffled
        assert f"{kept.answer}. y" in kept.prompt.splitlines()
    else:
        assert (kept.question, kept.answer) == (case["prompt"], case["answer"])


def test_rows_that_cannot_be_graded_are_rejected(tmp_path: Path) -> None:
    rows = [{**COLUMNS["openr1_math"]["row"], "question_type": kind} for kind in ("MCQ", "proof")]
    kept, (proof,) = found(preset("published", lines(tmp_path / "a", *rows), set="openr1_math"))
    assert (len(kept), proof.line, proof.reason) == (1, 2, "filtered")


def test_every_set_is_tested_and_in_the_guide() -> None:
    guide = Path("docs/guide/data.md").read_text()
    assert set(SETS) == set(REAL) | set(COLUMNS)
    for name in SETS:
        row = next(
            line for line in guide.splitlines() if line.startswith("|") and f"`{name}`" in line
        )
        verifier, is_real = row.split("|")[-3:-1]
        assert f"`{SETS[name].verifier}`" in verifier, name
        assert ("no" in is_real) == (name not in REAL), name


def test_unknown_set_is_named() -> None:
    with pytest.raises(ParamsError, match=r"settings\.set is 'dapo'; use: .*dapo_math_17k"):
        sources([preset("published", "a.parquet", set="dapo")])
