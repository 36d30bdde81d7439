"""What a policy was made from, and whether the one that is here may be kept.

Training takes minutes, and a pipeline that trains again because a comment changed is not used for
long. So the stage leaves `policy_source.json` beside the policy: digests of the parameters, of the
code that makes a policy as the compiler sees it (comments, layout and docstrings do not count), and
of the bytes of all files here.

Kept when parameters and that code are equal and only bytes differ. Made anew otherwise, also when
*nothing* differs: then someone forced the stage, or an output is damaged."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError, digest, digest_folder, read_json
from tasks.models.policy import policy_digest

MAKERS = ("tiny.py", "training.py", "tokenizer.py", "examples.py", "families/*.py")


def made_from(settings: Any, code: Path) -> dict[str, str]:
    """The three digests: `settings` (JSON-like), the makers under `code` without comments, and all
    files' bytes."""
    files = sorted(file for pattern in MAKERS for file in code.glob(pattern))
    syntax = [[file.relative_to(code).as_posix(), syntax_of(file.read_text())] for file in files]
    return {
        "params": digest(settings),
        "syntax": digest(syntax),
        "source": digest_folder(code, ["**/*.py"]),
    }


def syntax_of(source: str) -> str:
    """The syntax tree as text. Strings that stand alone as a statement, docstrings among them, do
    nothing and go."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not is_bare_string(line)]
    return ast.dump(tree)


def is_bare_string(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def only_comments_changed(now: Mapping[str, str], before: Mapping[str, str] | None) -> bool:
    """Whether parameters and code are those of `before`, and the files' bytes are not."""
    if before is None or now["source"] == before.get("source"):
        return False
    return all(now[key] == before.get(key) for key in ("params", "syntax"))


def path(layout: Layout) -> Path:
    return layout.root / "policy_source.json"


def recorded(layout: Layout) -> dict[str, str] | None:
    """What the policy that is here was made from; None when that is not known, or the policy is not
    as it was made."""
    try:
        card, source = read_json(layout.policy_card), read_json(path(layout))
    except ArtifactError:
        return None
    if card["location"] is not None or policy_digest(layout.policy) != card["digest"]:
        return None
    return dict(source["made_from"])
