"""Digests of code are equal on all Pythons, and cover all files that a program may import."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common import code
from tests.files import plant

SOURCE = '"""Old."""\ndef double(x):\n    """Say so."""\n    return 2 * x\n'

TRICKY = r"""
import a.b as c
from . import d
@c.decorated(1, *[2], key=3.5e-7, **{})
async def f(x, /, y: int = 1, *args: str, z=None, **kwargs) -> "list[int]":
    global g
    async with x as g, y:
        g = [i async for i in x if (h := i) is not None]
    try:
        return f"{x!r:>{y}} {y=} {z['k']:%Y-%m-%d} {{}}" "tail" f"{x}" 'é☃' "\N{SNOWMAN}\ud800"
    except* (ValueError, KeyError) as error:
        raise RuntimeError(f"a\tb{error}") from error
    else:
        "a comment of sorts"
    finally:
        del x[1:2, ..., ::3], y
class C(object, metaclass=type): x: int = -1j
def m(v):
    match v:
        case {"a": [1, *rest], **more} if rest: return u"x" if v else lambda *, q=1: q
        case C(x=0) | None: pass
    with (open(v) as one, open(v) as two): yield from (one, two)
    print(*v, sep='', end=not v, file=v[*v])
    nothing = f""; empty = f"{v}" f""; literal = f"only"
"""

OTHERS = ("python3.11", "python3.12", "python3.13")


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ('"""New."""\n\n# why\ndef double(x):\n    return (2 *\n        x)  # twice\n', True),
        ('def double(x):\n    "a"\n    return 2 * x\n    "why"\n', True),
        ('"""Old."""\ndef double(x):\n    """Say so."""\n    return 3 * x\n', False),
        ('"""Old."""\ndef double(x):\n    """Say so."""\n    return 2.0 * x\n', False),
        ('"""Old."""\ndef double(x):\n    return "Say so."\n', False),
        ('"""Old."""\ndef double(x=None):\n    return 2 * x\n', False),
        ('"""Old."""\ndef double(*, x):\n    return 2 * x\n', False),
    ],
)
def test_digest_excludes_comments(tmp_path: Path, source: str, same: bool) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text(source)
    digests = [code.digest_of(tmp_path / name) for name in ("a.py", "b.py")]
    assert (digests[0] == digests[1]) is same


def test_none_is_not_an_empty_field() -> None:
    dumps = {code.dump(ast.parse(text)) for text in ("return_(None)", "return_()", "x = None")}
    assert len(dumps) == 3


def interpreters() -> list[str]:
    """Return the other supported Pythons that are installed and start."""
    installed = Path.home().glob(".pyenv/versions/*/bin/python3.1[123]")
    found = {}
    for name in [*OTHERS, *map(str, sorted(installed))]:
        path = shutil.which(name)
        version = path and subprocess.run(
            [path, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
        )
        if version and version.returncode == 0:
            found[version.stdout] = path
    found.pop(f"{sys.version_info[:2]}\n", None)
    return [path for path in found.values() if path]


def test_digests_are_equal_on_every_supported_python(tmp_path: Path) -> None:
    others = interpreters()
    if not others:
        pytest.skip(f"none of {', '.join(OTHERS)} is installed beside this Python")
    (tmp_path / "tricky.py").write_text(TRICKY)
    program = (
        "import json, sys; from pathlib import Path; from tasks.common import code\n"
        "files = [Path(sys.argv[1]), *sorted(Path('tasks').rglob('*.py'))]\n"
        "print(json.dumps({str(path): code.digest_of(path) for path in files}))"
    )
    for python in others:
        done = subprocess.run(
            [python, "-c", program, str(tmp_path / "tricky.py")],
            capture_output=True,
            text=True,
            cwd=code.ROOT,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
        for name, digest in json.loads(done.stdout).items():
            assert code.digest_of(code.ROOT / name) == digest, f"{name} with {python}"


def test_reach_contains_all_importable_files(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "tasks/__init__.py": "",
            "tasks/a/__init__.py": "from tasks.b import around\n",
            "tasks/a/__main__.py": "def f():\n    from . import late\n    import os, torch.nn\n",
            "tasks/a/late.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from tasks.b import never\nstart('tasks.b.worker')\n",
            "tasks/a/unused.py": "",
            "tasks/b/__init__.py": "",
            "tasks/b/around.py": "open('page.html')\n",
            "tasks/b/page.html": "<p>",
            "tasks/b/other.html": "<p>",
            "tasks/b/worker.py": "",
            "tasks/b/never.py": "",
        },
    )
    found = code.reach(["tasks.a.__main__"], root)
    names = {path.relative_to(root / "tasks").as_posix() for path in found}
    package = {"__init__.py", "a/__init__.py", "b/__init__.py"}
    assert names == package | {
        *("a/__main__.py", "a/late.py", "b/around.py", "b/page.html", "b/worker.py")
    }
    assert code.libraries(found, root) == {"tasks", "os", "torch", "typing"}
