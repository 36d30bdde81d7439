"""Digests of code are equal on all Pythons, and cover all files that a program may import."""

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

SETTING = "@settings\nclass Loss:\n    clip_high: float{}\n"


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


def test_digest_excludes_the_defaults_of_settings() -> None:
    """They are in the effective settings. A value without a default is required."""
    sources = [SETTING.format(default).encode() for default in (" = 0.28", " = 0.3", "")]
    one, other, required = (code.facts(source).digest for source in sources)
    assert one == other != required


def test_digest_is_equal_on_every_supported_python(tmp_path: Path) -> None:
    (tmp_path / "tricky.py").write_text(TRICKY)
    assert code.digest_of(tmp_path / "tricky.py") == "7abc4790e5672283"


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
