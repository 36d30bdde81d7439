"""verl's Parquet (arXiv 2409.19256): `prompt` contains chat messages, and
`reward_model.ground_truth` contains the gold.

`data_source` becomes part of the source. verl selects its scorer by `data_source`; here the
verifier is `math`, unless the entry's `verifier` names one or selects it by a column."""

from dataclasses import dataclass

from tasks.ingest.candidates import Candidate, field
from tasks.ingest.files.formats import Record


@dataclass(frozen=True)
class Settings:
    """`level` is the name of a field (`extra_info.level`), or null."""

    path: str
    level: str | None


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one row."""
    row = record.fields
    origin = row.get("data_source")
    source = f"verl/{origin}" if origin else "verl"
    prompt = field(row, "prompt")
    answer = field(row, "reward_model.ground_truth")
    level = field(row, settings.level) if settings.level else None
    return Candidate(prompt, answer, "math", level, source=source)
