"""GSM-Symbolic (Mirzadeh et al., arXiv 2410.05229): grade-school word problems made from templates,
by the library reasoning-gym.

A problem is one of the library's templates with other names and numbers. Golds are numbers, and the
worked solution ends in `#### gold`, as in GSM8K. The level is the template's number. The library's
sentence about units is left out, and so are the templates that the library marks as faulty."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import reasoning_gym
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok as TEMPLATES

from tasks.common.params import ParamsError
from tasks.ingest.candidates import Candidate
from tasks.ingest.files.formats import Record


@dataclass(frozen=True)
class Settings:
    """`num_prompts` is the number of problems to generate, `templates` the numbers of the templates
    to use, in equal shares; null: all. A template yields some problems twice, so generate more than
    the splits need."""

    seed: int
    num_prompts: int
    templates: list[int] | None

    def __post_init__(self) -> None:
        if wrong := [n for n in self.templates or [] if n not in TEMPLATES] or self.templates == []:
            raise ParamsError(
                f"gsm_symbolic: templates has {wrong or 'no number'}; reasoning_gym has "
                f"{', '.join(map(str, TEMPLATES))}"
            )


def read(settings: Settings) -> Iterator[Record]:
    """Yield the problems. Each depends on the seed and on its place only."""
    make = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=0).generators
    templates = settings.templates or TEMPLATES
    for line in range(1, settings.num_prompts + 1):
        template = templates[line % len(templates)]
        problem = make[template](random.Random(f"{settings.seed}/{line}"), 1.0)
        fields = {**problem, **problem.pop("metadata", {}), "template": template}
        yield Record(line, json.dumps(fields, default=str), fields)


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one problem. A solution that ends in another number is left out."""
    problem = dict(record.fields)
    answer = str(problem["answer"]).replace(",", "")
    solution, mark, end = str(problem["answer_cot"]).rpartition("####")
    is_right = end.strip().replace(",", "") == answer
    worked = f"{solution.strip()}\n{mark} {answer}" if is_right else None
    return Candidate(problem["question"], answer, "numeric", problem["template"], solution=worked)
