"""IFEval (Zhou et al., arXiv 2311.07911): prompts with verifiable instructions, for the verifier
`ifeval`.

The gold contains `instruction_id_list` and `kwargs`; null arguments, which tables add, are removed.
The level is the number of instructions. Written from the published columns; not checked on real
rows."""

import json

from tasks.ingest.candidates import MISSING, Candidate, Unusable, field
from tasks.ingest.files.formats import File, Record

Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one prompt. Raise Unusable if the instructions or their arguments
    are not a list."""
    row = record.fields
    prompt = field(row, "prompt")
    names, arguments = field(row, "instruction_id_list"), field(row, "kwargs")
    if names is MISSING or arguments is MISSING:
        return Candidate(prompt, MISSING, "ifeval", None)
    if not isinstance(names, list) or not isinstance(arguments, list):
        raise Unusable("instruction_id_list and kwargs are not two lists")
    given = [
        {key: value for key, value in one.items() if value is not None}
        for one in (one if isinstance(one, dict) else {} for one in arguments)
    ]
    gold = json.dumps(
        {"instruction_id_list": names, "kwargs": given}, ensure_ascii=False, sort_keys=True
    )
    return Candidate(prompt, gold, "ifeval", str(len(names)))
