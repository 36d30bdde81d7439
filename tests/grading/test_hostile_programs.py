"""Hostile programs: none can forge a result or exceed a limit, and each is graded as wrong."""

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.grading.grader import Answer, Grader
from tasks.grading.programs import sandbox
from tasks.grading.settings import Verify
from tests.grading.test_code import ADD, SETTINGS, SUM, graded
from tests.grading.test_sandbox import RIGHT_ADD, RIGHT_SUM, running
from tests.patience import wait_for

pytestmark = pytest.mark.sandbox


@pytest.fixture(autouse=True, scope="module")
def _check_the_next_verdict() -> Iterator[None]:
    yield
    assert graded(RIGHT_ADD, ADD).outcome == "correct"
    assert graded(RIGHT_SUM, SUM).outcome == "correct"


FORGERIES = {
    "the end before the tests": "import os\nos._exit(0)",
    "a kill in a test": "import os\ndef add(a, b): os.kill(os.getpid(), 9)",
    "the end in a test": "import os\ndef add(a, b): os._exit(0)",
    "a result that equals all": (
        "class All:\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
        "def add(a, b): return All()"
    ),
    "a number that equals all": (
        "class All(int):\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def add(a, b): return All(7)"
    ),
    "replies in advance": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'{\"value\": 3}\\n' * 3)\n"
        "    except OSError: pass\n"
        "def add(a, b): return 7"
    ),
    "closed pipes": (
        "import os\n"
        "def add(a, b):\n"
        "    os.closerange(0, 100)\n"
        "    return a + b"
    ),
    "stack frames": (
        "import sys, gc\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if isinstance(value, dict) and 'outputs' in value:\n"
        "                return value['outputs'][0]\n"
        "        frame = frame.f_back\n"
        "    for thing in gc.get_objects():\n"
        "        if isinstance(thing, dict) and ('outputs' in thing or 'expected' in thing):\n"
        "            return thing.get('outputs', thing.get('expected'))\n"
        "    return 'found nothing'"
    ),
    "patched json": (
        "import json\n"
        "json.dumps = lambda *a, **k: '{\"value\": true}'\n"
        "def add(a, b): return 7"
    ),
    "patched builtins": (
        "import builtins, sys\n"
        "sys.modules['__main__'].__dict__['exec'] = None\n"
        "builtins.isinstance = lambda *a: True\n"
        "def add(a, b): return 7"
    ),
    "a result without end": (
        "def add(a, b):\n"
        "    import os\n"
        "    while True:\n"
        "        for fd in range(3, 64):\n"
        "            try: os.write(fd, b'x' * 65536)\n"
        "            except OSError: pass\n"
    ),
    "a huge integer": "def add(a, b): return 10 ** 100000",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_result_cannot_be_forged(name: str) -> None:
    verdict = graded(FORGERIES[name], ADD)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


REPLIES = {
    "no object": "[1]",
    "no JSON": "{",
    "no text": "\xff\xfe\x00",
    "no value": "{}",
    "a deep exception": '{"exception": ' + "[" * 900 + "]" * 900 + "}",
    "a deep value": '{"value": ' + "[" * 900 + "]" * 900 + "}",
    "a deeper value": '{"value": ' + '{"tuple": [' * 900 + "]}" * 900 + "}",
    "a value too deep for JSON": '{"value": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "an unknown kind": '{"value": {"list": [1]}}',
    "a set of lists": '{"value": {"set": [[1]]}}',
    "a huge complex": '{"value": {"complex": [1' + "0" * 400 + ", 0]}}",
    "a status of text": '{"status": "0", "stdout": "Mwo=", "stderr": ""}',
    "a huge status": '{"status": 1' + "0" * 4000 + ', "stdout": "Mwo=", "stderr": ""}',
    "no base64": '{"status": 0, "stdout": "%%%", "stderr": ""}',
    "a number as output": '{"status": 0, "stdout": 3, "stderr": null}',
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_malformed_reply_is_wrong_and_not_an_error(name: str) -> None:
    """An `error` would have no cost for the program."""
    reply = (REPLIES[name] + "\n").encode("latin-1")
    is_whole = "status" in name or name in ("no base64", "a number as output")
    pipe = "os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY)" if is_whole else "fd"
    write = (
        "import os\n"
        "def write():\n"
        "    for fd in range(3, 16):\n"
        f"        try: os.write({pipe}, {reply!r})\n"
        "        except OSError: pass\n"
    )
    if is_whole:
        program = f"{write}write()\nwhile True: pass"
        verdicts = [graded(program, SUM, seconds=0.3, stop_at_failure=True)]
    else:
        program = f"{write}def add(a, b):\n    try: write()\n    finally: os._exit(0)"
        asserts = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(1, 2) + 1 == 4"]})
        verdicts = [graded(program, ADD, float_tolerance=1e-6), graded(program, asserts)]
    for verdict in verdicts:
        assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


FORGED_OUTPUTS = {
    "the end": "import os\nos._exit(0)",
    "a report on every pipe": (
        "import os\n"
        "report = b'{\"status\": 0, \"stdout\": \"OQo=\", \"stderr\": \"\"}\\n'\n"
        "for process in ('self', os.getppid()):\n"
        "    for fd in range(0, 64):\n"
        "        try: open(f'/proc/{process}/fd/{fd}', 'wb').write(report)\n"
        "        except OSError: pass\n"
    ),
    "itself stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "its parent stopped": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "everybody stopped": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "output after the end": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    time.sleep(0.5)\n"
        "    print(3)\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED_OUTPUTS)
def test_output_cannot_be_forged(name: str) -> None:
    verdict = graded(FORGED_OUTPUTS[name], SUM)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


LIMITS = {
    "a loop in the program": ("while True: pass", ADD, "time limit"),
    "a loop that ignores signals": (
        "import signal\n"
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        SUM,
        "time limit",
    ),
    "sleep": ("import time\ndef add(a, b): time.sleep(1000)", ADD, "no result in 3 s on the clock"),
    "limits raised": (
        "import resource\n"
        "for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):\n"
        "    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    except (OSError, ValueError): pass\n"
        "x = bytearray(10 << 30)",
        SUM,
        "memory limit",
    ),
    "ten gigabytes in a call": ("def add(a, b): return bytearray(10 << 30)", ADD, "memory limit"),
    "ten gigabytes in processes of a thread": (
        "import os, threading, time\n"
        "def work():\n"
        "    for _ in range(12):\n"
        "        if os.fork() == 0:\n"
        "            x = bytearray(400 << 20)\n"
        "            time.sleep(100)\n"
        "    time.sleep(100)\n"
        "threading.Thread(target=work).start()\n"
        "time.sleep(100)",
        SUM,
        "memory limit",
    ),
    "output without end": ("while True: print('x' * 10000)", SUM, "output limit"),
    "many files": (
        "for i in range(10000):\n    open(f'{i}', 'wb').write(b'x' * (1 << 20))",
        SUM,
        "",
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        SUM,
        "",
    ),
    "a source that breaks the parser": ("(" * 5000 + ")" * 5000, SUM, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_limits_stop_a_program(name: str) -> None:
    program, gold, detail = LIMITS[name]
    # on a busy machine, processes allocate memory slowly
    seconds = 5.0 if "processes" in name else 1.0
    verdict = graded(program, gold, seconds=seconds, memory_mb=512, stop_at_failure=True)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0)
    assert detail in verdict.answer


@pytest.mark.slow
def test_fork_bomb_is_limited_and_ends() -> None:
    """Its processes are counted from outside during the run, and end with it."""
    token = f"98765{uuid.uuid4().int % 10**12}"
    bomb = (
        "import os\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        f"            os.execv('/usr/bin/sleep', ['sleep', '{token}'])\n"
        "    except OSError: pass\n"
    )
    most = 0
    with ThreadPoolExecutor(1) as thread:
        grading = thread.submit(graded, bomb, SUM, seconds=3.0, stop_at_failure=True)
        while not grading.done():
            most = max(most, len(running(token)))
            time.sleep(0.1)
    assert grading.result().outcome == "wrong"
    assert 2 < most <= sandbox.MAX_PROCESSES
    wait_for(lambda: not running(token))


@pytest.mark.slow
def test_hostile_programs_in_the_pool_are_wrong_and_not_errors() -> None:
    hostile = ["import os\nos._exit(0)", "while True: pass", "x = bytearray(10 << 30)"]
    programs = [program for bad in hostile for program in (bad, RIGHT_SUM)]
    answers = [Answer("x", f"```python\n{one}\n```", SUM, False) for one in programs]
    settings = {**SETTINGS, "seconds": 1.0, "stop_at_failure": True}
    with Grader(Verify(2, 20.0, 4.0, 0.0, {"x": settings})) as grader:
        verdicts = grader.grade(answers)
    assert [verdict.outcome for verdict in verdicts] == ["wrong", "correct"] * 3
