"""What a policy was made from, and whether the existing one can be kept.

Training takes minutes, and must not run again because a comment changed. So the stage writes
`policy_source.json` beside the policy: digests of the parameters, of the syntax of the code that
makes a policy (without comments, layout and docstrings), and of the bytes of all files here.

The policy is kept when parameters and syntax are equal and only bytes differ. Otherwise it is made
again, also when *nothing* differs: then someone forced the stage, or an output is damaged."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError, digest, digest_folder, read_json
from tasks.models.policy import policy_digest

# the code that makes a policy
MAKERS = ("tiny.py", "training.py", "tokenizer.py", "examples.py", "families/*.py")


def made_from(settings: Any, code: Path) -> dict[str, str]:
    """Return the three digests: of `settings` (JSON-like), of the syntax of the MAKERS under
    `code`, and of the bytes of all files there."""
    files = sorted(file for pattern in MAKERS for file in code.glob(pattern))
    syntax = [[file.relative_to(code).as_posix(), syntax_of(file.read_text())] for file in files]
    return {
        "params": digest(settings),
        "syntax": digest(syntax),
        "source": digest_folder(code, ["**/*.py"]),
    }


def syntax_of(source: str) -> str:
    """Return the syntax tree as text, without docstrings and other strings that are statements by
    themselves."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not is_bare_string(line)]
    return ast.dump(tree)


def is_bare_string(line: ast.stmt) -> bool:
    """Whether a statement is nothing but a string."""
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def only_comments_changed(now: Mapping[str, str], before: Mapping[str, str] | None) -> bool:
    """Whether parameters and syntax are the same as `before`, and the files' bytes are not."""
    if before is None or now["source"] == before.get("source"):
        return False
    return all(now[key] == before.get(key) for key in ("params", "syntax"))


def path(layout: Layout) -> Path:
    """Return the path of the record."""
    return layout.root / "policy_source.json"


def recorded(layout: Layout) -> dict[str, str] | None:
    """Return what the existing policy was made from; None if that is unknown, or if the policy has
    changed since."""
    try:
        card = read_json(layout.policy_card)
        source = read_json(path(layout))
    except ArtifactError:
        return None
    if card["location"] is not None or policy_digest(layout.policy) != card["digest"]:
        return None
    return dict(source["made_from"])
