"""A verifier that misbehaves on request."""

from pathlib import Path

import pytest

import tasks.grading.verifiers as verifiers

HOSTILE = """
import os, time
from tasks.grading.verdict import Verdict
def verify(completion, answer):
    if "/" not in completion:
        open(os.path.join(os.path.dirname(__file__), completion), "w").close()
    while completion == "hang": pass
    if completion == "die": os._exit(3)
    if completion.startswith("wait "):
        open(f"{completion[5:]}.{os.getpid()}", "w")
        while not os.path.exists(completion[5:]): time.sleep(0.01)
    if completion == "swell": return Verdict("correct", "x" * 2**32)
    if completion == "print": print("[[1]]", flush=True)
    if completion.startswith("raise"): raise ValueError("boom")
    if completion.startswith("score"): return Verdict("correct", "", float(completion[6:]))
    return Verdict("correct", completion)
"""


@pytest.fixture
def hostile_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the verifier `hostile`, and return its folder. It creates a file named like the
    completion, and then hangs, dies, raises or waits for a file, depending on the completion."""
    folder = tmp_path / "verifiers"
    folder.mkdir()
    (folder / "hostile.py").write_text(HOSTILE)
    (folder / "sitecustomize.py").write_text(
        f"import tasks.grading.verifiers as v\nv.__path__.append({str(folder)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path.cwd()}")
    monkeypatch.setattr(verifiers, "__path__", [*verifiers.__path__, str(folder)])
    return folder
