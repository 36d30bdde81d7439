"""The output of dvc and the stages, which goes to the terminal at once and, line by line, to the
records of the flow. Progress bars are separate from the lines.

If stages run at the same time, each line reaches the terminal whole, prefixed with the name of its
stage. A bar cannot move there, so its state is printed as a line every few seconds."""

import codecs
import fcntl
import os
import pty
import re
import select
import termios
import threading
import time
from collections import deque
from dataclasses import dataclass, field

STREAMS = (1, 2)  # standard output and error
NUM_TAIL = 40
MAX_WAITING = 10_000  # lines that are not yet read
MAX_LINE = 2_000  # characters kept per line
MAX_BAR = 500  # characters of a progress bar
SETTLE_SECONDS = 2.0
BAR_SECONDS = 10.0  # between two lines of a progress bar
ONE_LINE = threading.Lock()  # several outputs write to one terminal
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
BAR = re.compile(r"^\s*(?P<label>.*?):\s+(?:(?P<percent>\d+)%\|)?.*\[\d+:\d\d.*\]\s*$")


@dataclass
class Lines:
    """The last lines of some streams, the lines not yet taken, and the last state of each progress
    bar: (percent, text), keyed by the bar's label."""

    tail: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_TAIL))
    waiting: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    bars: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Add a line, or a bar's state; skip empty lines, and bars without a percentage."""
        line = plain(line)
        if bar := bar_of(line):
            if bar["percent"]:
                self.bars[bar["label"]] = (float(bar["percent"]), line.strip())
        elif line:
            self.tail.append(line)
            self.waiting.append(line)

    def take(self, most: int) -> list[str]:
        """Remove and return the waiting lines. If there are more than `most`, only the last `most`
        are returned, after a line that states the number of omitted ones."""
        left_out = max(len(self.waiting) - most, 0)
        found = [self.waiting.popleft() for _ in range(len(self.waiting))][left_out:]
        omitted = [f"({left_out} lines omitted; the terminal shows them)"] if left_out else []
        return omitted + found

    def clear(self) -> None:
        self.tail.clear()
        self.waiting.clear()
        self.bars.clear()


def plain(line: str) -> str:
    """Return a line without control sequences, truncated to MAX_LINE."""
    return ESCAPE.sub("", line[:MAX_LINE]).rstrip()


def bar_of(line: str) -> re.Match[str] | None:
    """Return the match of BAR if the line is the state of a progress bar, else None."""
    return BAR.match(line) if len(line) <= MAX_BAR else None


class Output:
    """The standard streams of a child process, which a thread reads to their end. The child gets a
    terminal if this process has one, so that progress bars move. With `is_labelled` the child gets
    no terminal, and every line is passed on with the prefix `label`."""

    def __init__(self, *, is_labelled: bool = False) -> None:
        self.lines = Lines()
        self.label = ""
        self.is_labelled = is_labelled
        self.bars_shown: dict[str, float] = {}
        self.lock = threading.Lock()
        pairs = [os.pipe() if is_labelled else open_stream(stream) for stream in STREAMS]
        self.ends = [end for _, end in pairs]  # for the child
        self.streams = {ours: stream for (ours, _), stream in zip(pairs, STREAMS, strict=True)}
        self.thread = threading.Thread(target=self.read, name="output", daemon=True)

    def start(self) -> None:
        """Close the child's ends in this process, and start to read. The child must be running."""
        for end in self.ends:
            os.close(end)
        self.thread.start()

    def read(self) -> None:
        """Pass on all output until no process has the streams open."""
        decoders = {ours: codecs.getincrementaldecoder("utf-8")("replace") for ours in self.streams}
        rests = dict.fromkeys(self.streams, "")
        open_ = set(self.streams)
        while open_:
            for ours in select.select(sorted(open_), [], [])[0]:
                with self.lock:
                    data = read_some(ours)
                    if not data:
                        open_.discard(ours)
                        os.close(ours)
                        continue
                    if not self.is_labelled:
                        pass_on(self.streams[ours], data)
                    text = rests[ours] + decoders[ours].decode(data)
                    *whole, rest = re.split(r"[\r\n]", text)
                    rests[ours] = rest[:MAX_LINE]  # the terminal has all of it
                    for line in whole:
                        self.lines.add(line)
                        if self.is_labelled:
                            self.pass_on_line(self.streams[ours], line)

    def pass_on_line(self, stream: int, line: str) -> None:
        """Write a line with its label, but a bar's line only every BAR_SECONDS and at 100 %."""
        line = plain(line)
        if bar := bar_of(line):
            now = time.monotonic()
            shown = self.bars_shown.setdefault(bar["label"], now)
            if now < shown + BAR_SECONDS and bar["percent"] != "100":
                return
            self.bars_shown[bar["label"]] = now
        if line:
            label = f"{self.label} | " if self.label else ""
            with ONE_LINE:
                pass_on(stream, f"{label}{line}\n".encode())

    def settle(self) -> None:
        """Wait until everything written so far has been read, for at most SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.thread.is_alive() and time.monotonic() < deadline:
            with self.lock:
                try:
                    if not select.select(list(self.streams), [], [], 0)[0]:
                        return
                except (OSError, ValueError):  # a stream has ended
                    return
            time.sleep(0.005)

    def join(self) -> None:
        """Wait for the end of the streams, at most SETTLE_SECONDS if a process keeps them open."""
        self.thread.join(SETTLE_SECONDS)


def open_stream(stream: int) -> tuple[int, int]:
    """Return (our end, the child's end) of a pipe, or of a pty if `stream` is a terminal here."""
    if not os.isatty(stream):
        return os.pipe()
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # the real terminal processes output
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    size = fcntl.ioctl(stream, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


def read_some(descriptor: int) -> bytes:
    """Return the bytes that can be read now; none at the end of a pipe or terminal."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def pass_on(stream: int, data: bytes) -> None:
    """Write all bytes. Drop them if the stream cannot be written, so that the stage continues."""
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        return
