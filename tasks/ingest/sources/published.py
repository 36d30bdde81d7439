"""Published data sets by name: a line of SETS says which columns each has, for `mapping`.

Columns are those under which a set was published; a copy with others is a `mapping`. GSM8K, MATH
and SVAMP have presets of their own. Left out: proofs, code, and what needs images."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tasks.common.params import ParamsError
from tasks.ingest import fields
from tasks.ingest.answers import Extract, Golds
from tasks.ingest.candidates import Candidate, Rejection, as_text
from tasks.ingest.formats import Record
from tasks.ingest.selection import conditions_of, excluded
from tasks.ingest.sources import mapping


@dataclass(frozen=True)
class Settings:
    """`set` is a name in SETS, `path` that of the file."""

    set: str
    path: str

    @property
    def name(self) -> str:
        """The `source` of the rows."""
        return self.set


@dataclass(frozen=True)
class Form:
    """The columns of a set, as `mapping` has them. `origin` is a column that becomes part of the
    source; `where` leaves out what cannot be graded; `question` has the question alone."""

    prompt: str
    answer: str
    verifier: str = "math"
    level: str | None = None
    options: str | list[str] | None = None
    golds: Golds | None = None
    tolerance: str | None = None
    extract: Extract | None = None
    json: list[str] | None = None
    origin: str | None = None
    where: Mapping[str, list[str]] = field(default_factory=dict)
    question: str | None = None


VERL = Form("prompt", "reward_model.ground_truth", origin="data_source")
USUAL = Form("problem", "answer")
PROVABLE = {"question_type": ["math-word-problem", "MCQ"]}
GPQA_OPTIONS = ["Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]

SETS = {
    # to train on
    "dapo_math_17k": VERL,
    "deepscaler": USUAL,
    "deepscaler_verl": replace(VERL, question="extra_info.question"),
    "orz": Form("row[0].value", "row[1].ground_truth.value"),
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
    "limr": Form("prompt", "answer", level="source"),
    "deepmath": Form("question", "final_answer", level="difficulty"),
    "agentica_math": replace(USUAL, level="difficulty"),
    # to test on
    "math_500": replace(USUAL, level="level"),
    "math_500_columns": Form("problem", "expected_answer", level="level"),
    "math_500_verl": replace(VERL, level="extra_info.level"),
    "aime": Form("problem|Problem|question", "answer|Answer"),
    "aime_verl": VERL,
    "amc": Form("problem|question", "answer"),
    "orz_test": Form("prompt", "final_answer"),
    "olympiadbench": Form(
        "{context?}\n{question}", "final_answer", golds="all", tolerance="error", level="subfield"
    ),
    "olympiadbench_agentica": Form(
        "{context?}\n{problem}", "answer", golds="all", tolerance="error", level="subfield"
    ),
    "omni_math": replace(USUAL, level="difficulty"),
    "minerva": Form("problem", "solution", extract="boxed", level="type"),
    "ocw": USUAL,
    "asdiv": Form("{body} {question}", "answer", "numeric", "solution_type"),
    "mawps": Form("input", "target", "numeric", "type"),
    "gsm_hard": Form("input", "target", "numeric"),
    "mgsm": Form("messages|question", "answer|answer_number", "numeric"),
    "cmath": Form("question", "answer", "numeric", "grade"),
    "carp_en": Form("content", "answer"),
    "mmlu": Form("question", "answer", "choice", "subject|type", options="choices"),
    "mmlu_pro": Form("question", "answer", "choice", "category", options="options"),
    "arc": Form("question", "answerKey", "choice", options="choices"),
    "gpqa": Form("Question", "Correct Answer", "choice", "High-level domain", options=GPQA_OPTIONS),
    "aqua": Form("question", "correct", "choice", options="options"),
    "sat_math": Form("question", "Answer", "choice", options="options"),
    "gaokao_math_qa": Form("question", "label", "choice", options="options"),
}


def checked(settings: Settings, where: str) -> Settings:
    """Return the settings. Raises ParamsError for a set that is not in the table."""
    if settings.set not in SETS:
        raise ParamsError(f"{where}.set is {settings.set!r}; there is: {', '.join(sorted(SETS))}")
    return settings


@lru_cache(maxsize=64)
def mapped(settings: Settings) -> mapping.Settings:
    """Return the set's form as settings of `mapping`."""
    form = SETS[settings.set]
    return mapping.Settings(
        path=settings.path,
        name=settings.set,
        prompt=form.prompt,
        answer=form.answer,
        level=form.level,
        verifier=form.verifier,
        options=form.options,
        first_option=None,
        golds=form.golds,
        tolerance=form.tolerance,
        extract=form.extract,
        json=form.json,
    )


def candidate(record: Record, settings: Settings) -> Candidate | Rejection:
    """Return one row of the set."""
    form = SETS[settings.set]
    row = record.fields
    origin = fields.field(row, form.origin) if form.origin else None
    source = f"{settings.set}/{as_text(origin)}" if isinstance(origin, str) else settings.set
    if reason := excluded(row, conditions_of(form.where, settings.set)):
        return Rejection(source, record.line, *reason, record.content)
    found = mapping.candidate(record, mapped(settings))
    question = fields.field(row, form.question) if form.question else None
    if isinstance(found, Candidate) and isinstance(question, str):
        found = replace(found, question=question)
    return replace(found, source=source)
