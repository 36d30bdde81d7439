"""The process inside the sandbox: it loads a program and runs it on one input after the other.

It is started with `python -c` and its own source, and imports only the standard library. It reads
and writes lines of JSON on standard input and output; the program has access to neither. It
receives inputs but never the expected results, because the program can read and change everything
in this process. Its replies are therefore judged in another process.

The first input line is the configuration: `memory`, `file_bytes`, `processes`, `packages` (a folder
to import from, or null), `parent_death` (whether this process dies with its parent). Every later
line is a request that has `"seconds"` (its limit on CPU time) and gets one reply line. Requests:

- {"load": source, "name": name, "run": false}: compile the program; if `run` is true (for calls and
  assertions), also run the source `before` and then the program;
- {"stdin": text}: run the program in a new process, with this standard input;
- {"call": name, "arguments": [...]}: call this function, or this method of the class `Solution`;
- {"evaluate": expression} or {"execute": statements}: do so in the program's scope."""

import base64
import io
import json
import math
import os
import resource
import sys
import types
from typing import Any

MAIN = "__main__"
MAX_MESSAGE = 300  # characters of an exception
STACK_BYTES = 64 << 20  # for programs that recurse deeply
MAX_OPEN_FILES = 64


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    configuration = json.loads(requests.readline())
    limit(configuration)
    send(replies, {"ready": True})
    for descriptor in (0, 1, 2):  # startup messages went to the real ones
        os.dup2(nowhere, descriptor)
    program = Program()
    while line := requests.readline():
        request = json.loads(line)
        if "stdin" not in request:
            send(replies, answer(program, request))
            continue
        files = (unnamed(request["stdin"].encode()), unnamed(b""), unnamed(b""))
        child = os.fork()
        if child == 0:
            if configuration["parent_death"]:  # a child does not inherit this
                die_with_parent()
            os.close(replies)
            requests.close()
            become(files)
            limit_cpu(request["seconds"])
            break
        os.close(files[0])
        _, status = os.waitpid(child, 0)
        send(replies, {"status": status, "stdout": content(files[1]), "stderr": content(files[2])})
    else:
        return
    # only a forked process reaches this line; it exits like any interpreter and flushes its output
    run_as_main(program)


def limit(configuration: dict[str, Any]) -> None:
    """Limit the resources of this process and all its descendants, irrevocably."""
    if configuration["parent_death"]:
        die_with_parent()
    if configuration["packages"] is not None:
        sys.path.append(configuration["packages"])
    sys.set_int_max_str_digits(0)
    at_most(resource.RLIMIT_AS, configuration["memory"])
    at_most(resource.RLIMIT_FSIZE, configuration["file_bytes"])
    at_most(resource.RLIMIT_NPROC, configuration["processes"])
    at_most(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    at_most(resource.RLIMIT_STACK, STACK_BYTES)
    at_most(resource.RLIMIT_CORE, 0)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def at_most(kind: int, value: int | None) -> None:
    """Lower a limit if a value is given and the limit is not already lower."""
    hard = resource.getrlimit(kind)[1]
    if value is not None and hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    if value is not None:
        resource.setrlimit(kind, (value, value))


def limit_cpu(seconds: float) -> None:
    """Allow this process `seconds` more of CPU time. The total is rounded up to whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        until = min(until, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


class Program:
    """The compiled program, and the module in which it runs."""

    def __init__(self) -> None:
        self.code: types.CodeType | None = None
        self.module = types.ModuleType(MAIN)


def answer(program: Program, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request. An exception in the program becomes a message."""
    names = program.module.__dict__
    try:
        limit_cpu(request["seconds"])
        if "load" in request:
            program.code = compile(request["load"], request["name"], "exec", dont_inherit=True)
            if not request["run"]:
                return {"value": None}
            sys.modules[MAIN] = program.module
            # this process exists to run programs that are not trusted: see `sandbox`
            exec(compile(request["before"], "<prelude>", "exec"), names)  # nosec B102
            exec(program.code, names)  # nosec B102
            return {"value": None}
        if "execute" in request:
            code = compile(request["execute"], "<test>", "exec", dont_inherit=True)
            exec(code, names)  # nosec B102
            return {"value": None}
        if "evaluate" in request:
            code = compile(request["evaluate"], "<test>", "eval", dont_inherit=True)
            value = eval(code, names)  # nosec B307
        else:
            value = function_of(names, request["call"])(*request["arguments"])
        return {"value": encoded(value)}
    except BaseException as error:
        return {"exception": message_of(error)}


def function_of(names: dict[str, Any], name: str) -> Any:
    """Return the program's function `name` or, if only `Solution` is defined, its method `name`."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    return names[name]


def encoded(value: Any) -> Any:
    """Return a value in JSON types. A list, text, a number, a boolean and None represent
    themselves; other types are mappings with one key, the name of the type."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return encoded(value.tolist())
    for kind in (tuple, list, set, frozenset):
        if isinstance(value, kind):
            items = [encoded(item) for item in value]
            return items if kind is list else {kind.__name__: items}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return {"other": type(value).__name__}


def message_of(error: BaseException) -> str:
    """Return an exception as text, like the last line of a traceback. Importing `traceback` would
    slow down every start."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except BaseException:  # its own __str__ can raise
        return type(error).__name__


def unnamed(data: bytes) -> int:
    """Return a descriptor of a new unnamed file with this content, positioned at its start."""
    name = os.urandom(16).hex()
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def content(descriptor: int) -> str:
    """Return the content of a file in base64, and close the file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return base64.b64encode(file.read()).decode()


def become(files: tuple[int, int, int]) -> None:
    """Replace this process's standard input, output and error with these files."""
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(standard(0, "r")), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(standard(1, "w")), encoding="utf-8")
    errors = io.BufferedWriter(standard(2, "w"))
    sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", line_buffering=True)


def standard(descriptor: int, mode: str) -> io.FileIO:
    """Return an unbuffered file object for a standard stream."""
    return io.FileIO(descriptor, mode, closefd=False)


def run_as_main(program: Program) -> None:
    """Run the program as `python FILE` would."""
    sys.argv = ["program.py"]
    sys.modules[MAIN] = program.module
    assert program.code is not None
    try:
        exec(program.code, program.module.__dict__)  # nosec B102
    except SystemExit:
        raise
    except BaseException as error:
        print(message_of(error), file=sys.stderr)
        sys.exit(1)


def send(replies: int, value: Any) -> None:
    """Write a line of JSON, in several writes if the pipe accepts only a part."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
