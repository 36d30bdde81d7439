"""The flow passes on the output of the stages unchanged, and keeps its last lines."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from flows.pipeline.output import MAX_LINE, NUM_TAIL, Lines, open_stream, read_some
from tests.patience import PATIENCE


def test_lines_exclude_bars_and_escapes() -> None:
    lines = Lines()
    lines.add("\x1b[32mstarted\x1b[0m")
    lines.add("sample (hf):   9%|\u2589         | 1.49k/16.4k [00:10<01:40, 149rollout/s]")
    lines.add("sample (hf):  18%|\u2589         | 2.98k/16.4k [00:20<01:30, 149rollout/s]")
    lines.add("ingest: 5.12krow [00:00, 12.8krow/s]")
    lines.add("   ")
    lines.add("12:00:01 profile: 40 % of the rollouts")
    assert lines.take(10) == ["started", "12:00:01 profile: 40 % of the rollouts"]
    assert lines.take(10) == []
    assert list(lines.bars) == ["sample (hf)"]
    assert lines.bars["sample (hf)"][0] == 18.0
    assert list(lines.tail) == ["started", "12:00:01 profile: 40 % of the rollouts"]


def test_long_line_is_truncated() -> None:
    lines = Lines()
    lines.add("a: [0:00" * 1_000_000)
    lines.add("\x1b]" * 1_000_000)
    (kept,) = lines.take(9)
    assert kept.startswith("a: [0:00a: [0:00")
    assert len(kept) == MAX_LINE
    assert not lines.bars


def test_last_lines_are_kept_and_omitted_ones_counted() -> None:
    lines = Lines()
    for number in range(200):
        lines.add(f"line {number}")
    assert list(lines.tail) == [f"line {number}" for number in range(200 - NUM_TAIL, 200)]
    taken = lines.take(3)
    assert taken[0].startswith("(197 lines omitted")
    assert taken[1:] == ["line 197", "line 198", "line 199"]


CHILD = (
    "import sys\n"
    "print('out \u00e9', flush=True)\n"
    "sys.stderr.write('bar:  50%|x| 1/2 [00:01<00:01, 1it/s]\\rerr\\n')\n"
)
PROGRAM = f"""
import subprocess, sys
from flows.pipeline.output import Output
output = Output()
stdout, stderr = output.ends
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=stdout, stderr=stderr)
output.start()
child.wait()
output.settle()
output.join()
assert not output.thread.is_alive()
assert sorted(output.lines.take(9)) == ["err", "out \u00e9"], output.lines
assert output.lines.bars["bar"][0] == 50.0
"""


def test_streams_are_passed_on_unchanged() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == "out \u00e9\n".encode()
    assert done.stderr == b"bar:  50%|x| 1/2 [00:01<00:01, 1it/s]\rerr\n"


def test_closed_output_does_not_stop_the_child() -> None:
    program = PROGRAM.replace("child.wait()", "assert child.wait() == 0")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr.decode()


def test_child_has_a_terminal_of_the_same_width() -> None:
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
    end, childs = open_stream(terminal)
    program = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty())"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=childs)
    os.close(childs)
    written = b""
    while not written.endswith(b"\n"):
        written += read_some(end)
    assert written == b"123 True\n"  # without a carriage return: the terminal adds it
    child.wait()
    assert read_some(end) == b""
    for descriptor in (ours, terminal, end):
        os.close(descriptor)


LABELLED = """
import os
from flows.pipeline.output import Output
output = Output(is_labelled=True)
output.label = "train@grpo-0"
out, err = output.ends
os.write(out, b"first\\nhal")
for done in (1, 2, 3, 100):
    os.write(err, f"\\x1b[Atrain: {done}%|x| {done}/100 [00:01<00:01, 1it/s]\\r".encode())
os.write(out, b"f\\n\\n")
output.start()
output.join()
assert list(output.lines.tail) == ["first", "half"]
assert output.lines.bars["train"][0] == 100.0
"""


def test_labelled_lines_and_bars() -> None:
    done = subprocess.run([sys.executable, "-c", LABELLED], capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"train@grpo-0 | first\ntrain@grpo-0 | half\n"
    (shown,) = done.stderr.decode().splitlines()
    assert shown.startswith("train@grpo-0 | train: 100%")
