"""Published data sets by name. Each entry of SETS names the columns of one set, for `mapping`.

The columns are the published ones; use `mapping` for a copy with other columns. GSM8K, MATH and
SVAMP have their own presets. Not supported: proofs, code, and problems that require images."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.common.params import ParamsError
from tasks.ingest import fields
from tasks.ingest.candidates import Candidate, Unusable
from tasks.ingest.files.formats import Record
from tasks.ingest.selection import conditions_of, select
from tasks.ingest.sources import mapping


@dataclass(frozen=True)
class Settings:
    """`set` is a name in SETS, `path` the path of the file."""

    set: str
    path: str

    @property
    def name(self) -> str:
        """The `source` of the rows."""
        return self.set


@dataclass(frozen=True)
class Form(mapping.Settings):
    """The columns of a set. `origin` is a column that becomes part of the source; `where` selects
    the rows that can be graded; `question` is the column with only the question."""

    origin: str | None = None
    where: Mapping[str, list[str]] = field(default_factory=dict)
    question: str | None = None


def form(
    prompt: str, answer: str, verifier: str = "math", level: str | None = None, **others: Any
) -> Form:
    """Return a data set's columns as settings of `mapping`, with an empty path and name."""
    return Form("", "", prompt, answer, level, verifier, **others)


VERL = form("prompt", "reward_model.ground_truth", origin="data_source")
USUAL = form("problem", "answer")
PROVABLE = {"question_type": ["math-word-problem", "MCQ"]}
GPQA_OPTIONS = ["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]

SETS = {  # training sets, then test sets
    "dapo_math_17k": VERL,
    "deepscaler": USUAL,
    "deepscaler_verl": replace(VERL, question="extra_info.question"),
    "orz": form("row[0].value", "row[1].ground_truth.value"),
    "skywork_or1": replace(
        VERL,
        golds="any",
        json=["reward_model.ground_truth"],
        level="extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-7B",
    ),
    "big_math": replace(USUAL, level="source"),
    "openr1_math": replace(USUAL, level="problem_type", where=PROVABLE),
    "numina_math_1_5": replace(
        USUAL, level="problem_type", where={**PROVABLE, "problem_is_valid": ["Yes"]}
    ),
    "eurus_2_math": replace(VERL, where={"ability": ["math"]}),
    "polaris": replace(USUAL, level="difficulty"),
    "limr": form("prompt", "answer", level="source"),
    "deepmath": form("question", "final_answer", level="difficulty"),
    "agentica_math": replace(USUAL, level="difficulty"),
    "math_500": replace(USUAL, level="level"),
    "math_500_columns": form("problem", "expected_answer", level="level"),
    "math_500_verl": replace(VERL, level="extra_info.level"),
    "aime": form("problem|Problem|question", "answer|Answer"),
    "aime_verl": VERL,
    "amc": form("problem|question", "answer"),
    "orz_test": form("prompt", "final_answer"),
    "olympiadbench": form(
        "{context?}\n{question}", "final_answer", golds="all", tolerance="error", level="subfield"
    ),
    "olympiadbench_agentica": form(
        "{context?}\n{problem}", "answer", golds="all", tolerance="error", level="subfield"
    ),
    "omni_math": replace(USUAL, level="difficulty"),
    "minerva": form("problem", "solution", extract="boxed", level="type"),
    "ocw": USUAL,
    "asdiv": form("{body} {question}", "answer", "numeric", "solution_type"),
    "mawps": form("input", "target", "numeric", "type"),
    "gsm_hard": form("input", "target", "numeric"),
    "mgsm": form("messages|question", "answer|answer_number", "numeric"),
    "cmath": form("question", "answer", "numeric", "grade"),
    "carp_en": form("content", "answer"),
    "mmlu": form("question", "answer", "choice", "subject|type", options="choices"),
    "mmlu_pro": form("question", "answer", "choice", "category", options="options"),
    "arc": form("question", "answerKey", "choice", options="choices", first_option=1),
    "gpqa": form("Question", "Correct Answer", "choice", "High-level domain", options=GPQA_OPTIONS),
    "aqua": form("question", "correct", "choice", options="options"),
    "sat_math": form("question", "Answer", "choice", options="options"),
    "gaokao_math_qa": form("question", "label", "choice", options="options"),
}


def checked(settings: Settings, where: str) -> Settings:
    """Return the settings. Raise ParamsError for a set that is not in the table."""
    if settings.set not in SETS:
        raise ParamsError(f"{where}.set is {settings.set!r}; use: {', '.join(sorted(SETS))}")
    return settings


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one row of the set."""
    mapped = replace(SETS[settings.set], path=settings.path, name=settings.set)
    row = record.fields
    origin = fields.field(row, mapped.origin) if mapped.origin else None
    source = f"{settings.set}/{origin}" if isinstance(origin, str) else settings.set
    try:
        select(row, conditions_of(mapped.where, settings.set))
        found = mapping.candidate(record, mapped)
    except Unusable as error:
        error.source = source
        raise
    question = fields.field(row, mapped.question) if mapped.question else None
    return replace(found, source=source, question=question if isinstance(question, str) else None)
