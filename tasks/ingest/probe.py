"""Which rows of a Parquet or Arrow file can be read, found out in a process that can die.

A kilobyte of Parquet can claim billions of values. A reader then takes all memory or aborts its
process, which nothing in that process can catch. So a file is first read once in a process of its
own, with limits of memory and time, part by part: a row group of Parquet, a whole Arrow file. A
part in which that process dies is left out, and the others are read; a file that is merely damaged
is an error.

    python -m tasks.ingest.probe KIND PATH PART

writes a line with the number of rows of every part, and then a line for every part from PART that
could be read."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from polars import selectors

from tasks.common.parent import die_with_parent
from tasks.ingest.bounded import MAX_EXPANSION, SMALLEST_LIMIT

MEMORY_GB = 8
SECONDS, SECONDS_PER_BYTE = 60, 1e-6  # of CPU time
MIN_ROWS, ROWS_PER_BYTE = 1_000_000, 100  # a file that claims more has no rows of its own
OVER_MEMORY, EXPANDED = 3, 4  # exit statuses
MAX_FAULTS = 20  # parts that cannot be read, after which the rest is given up
STALLED_SECONDS = 20.0  # without any computing
BATCH_ROWS = 10_000  # read at a time


class Damaged(Exception):
    """The file is not what its format says; the message says how."""


@dataclass(frozen=True)
class Part:
    """So many rows from a row on, counted from 0; `fault` says why they cannot be read."""

    first: int
    num_rows: int
    fault: str | None


def parts(path: Path, kind: str) -> Iterator[Part]:
    """Yield the parts of a table in order. Raises Damaged."""
    start, num_faults = 0, 0
    while True:
        sizes, num_read, why = read_in_child(path, kind, start)
        firsts = [sum(sizes[:n]) for n in range(len(sizes))]
        for number in range(start, start + num_read):
            yield Part(firsts[number], sizes[number], None)
        start += num_read
        if start == len(sizes):
            return
        num_faults += 1
        if num_faults == MAX_FAULTS:
            yield Part(firsts[start], sum(sizes[start:]), f"{why}; the rest is given up")
            return
        yield Part(firsts[start], sizes[start], why)
        start += 1


def read_in_child(path: Path, kind: str, start: int) -> tuple[list[int], int, str]:
    """Return the number of rows of every part, how many parts from `start` could be read, and what
    ended the process before the next."""
    command = [sys.executable, "-m", "tasks.ingest.probe", kind, str(path), str(start)]
    child = run_watched(command)
    lines = child.stdout.splitlines()
    said = child.stderr.strip().splitlines()
    why = said[-1][:300] if said else f"its reader ended with status {child.returncode}"
    if not lines or child.returncode not in FAULTS:
        raise Damaged(why)
    return json.loads(lines[0]), len(lines) - 1, FAULTS[child.returncode]


def run_watched(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run`, but the process is killed when it computes nothing for long: a reader
    one of whose threads got no memory waits for it for ever."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as child:
        spent, since = 0.0, time.monotonic()
        try:
            while True:
                try:
                    printed, errors = child.communicate(timeout=1.0)
                    return subprocess.CompletedProcess(command, child.returncode, printed, errors)
                except subprocess.TimeoutExpired:
                    now, state = spent, ""
                    with suppress(psutil.Error):
                        process = psutil.Process(child.pid)
                        now, state = sum(process.cpu_times()[:2]), process.status()
                    if now > spent or state in (psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED):
                        spent, since = now, time.monotonic()
                    elif time.monotonic() - since > STALLED_SECONDS:
                        child.kill()
        except BaseException:
            child.kill()
            raise


FAULTS = {
    0: "",
    OVER_MEMORY: (
        f"they need more than {MEMORY_GB} GB of memory, or their reader stood still for "
        f"{STALLED_SECONDS:.0f} s; write smaller row groups"
    ),
    EXPANDED: f"they become more than {MAX_EXPANSION} times the file's size",
    -signal.SIGXCPU: "they take too long to read",
}
FAULTS |= dict.fromkeys((-signal.SIGABRT, -signal.SIGKILL), FAULTS[OVER_MEMORY])
FAULTS |= dict.fromkeys((-signal.SIGSEGV, -signal.SIGBUS), "they crash their reader")
"""Why a part cannot be read, by the status that its reader ended with."""


def sizes_of(path: Path, kind: str) -> list[int]:
    """The number of rows of every part, as the file claims. Raises ValueError where it claims more
    than it can have."""
    if kind == "parquet":
        footer = pq.ParquetFile(path).metadata
        sizes = [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
    else:
        sizes = [sum(batch.num_rows for batch in arrow_batches(path))]
    limit = max(MIN_ROWS, ROWS_PER_BYTE * path.stat().st_size)
    if sum(sizes) > limit or min(sizes, default=0) < 0:
        raise ValueError(f"it claims {sum(sizes):,} rows, and so small a file has none to say it")
    return sizes


def batches(path: Path, kind: str, part: Part) -> Iterator[pl.DataFrame]:
    """Yield the rows of a part, in batches."""
    if kind == "parquet":
        rows = pl.scan_parquet(path, glob=False).slice(part.first, part.num_rows)
        yield from rows.collect_batches(chunk_size=BATCH_ROWS, lazy=True)
        return
    for batch in arrow_batches(path):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield pl.DataFrame(pl.from_arrow(batch.slice(start, BATCH_ROWS)))


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file or stream."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)


def num_bytes(batch: pl.DataFrame) -> int:
    """How large the rows are as plain text: an entry of a dictionary counts as often as it stands
    in a row."""
    written_out = batch.cast({selectors.categorical() | selectors.enum(): pl.String})
    return int(written_out.to_arrow(compat_level=pl.CompatLevel.oldest()).nbytes)


def main() -> None:
    """Read a file as the command line says; status 3 where the memory does not suffice."""
    try:
        read()
    except (MemoryError, pa.ArrowMemoryError):
        sys.exit(OVER_MEMORY)


def read() -> None:
    """Read a file from a part on, under limits; status 4 for a part that becomes too much."""
    kind, path, start = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent()
    seconds = int(SECONDS + SECONDS_PER_BYTE * path.stat().st_size)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GB << 30, MEMORY_GB << 30))
    sizes = sizes_of(path, kind)
    print(json.dumps(sizes), flush=True)
    for number in range(start, len(sizes)):
        part = Part(sum(sizes[:number]), sizes[number], None)
        left = max(SMALLEST_LIMIT, MAX_EXPANSION * path.stat().st_size)
        for batch in batches(path, kind, part):
            left -= num_bytes(batch)
            if left < 0:
                sys.exit(EXPANDED)
        print(number, flush=True)


if __name__ == "__main__":
    main()
