"""What runs inside the sandbox: it loads a program and runs it on one input after the other.

It is started as `python -c`, from its own text, and imports the standard library alone. Lines of
JSON come in on standard input and go out on standard output; the program gets neither of the two.
It is told inputs and never what is expected of them, because everything in this process can be read
and changed by the program. What it says of the program is therefore judged outside.

The first line in is the configuration: `memory`, `file_bytes`, `processes`, `packages` (a folder to
import from, or null), `parent_death` (whether this process dies with its parent). Every later line
is one of these; a line goes out for each:

- {"load": source, "name": name}: compile it; for calls (`"run": true`) also run it, after `before`;
- {"stdin": text, "seconds": s}: run it in a process of its own, with this standard input;
- {"call": name, "arguments": [...], "seconds": s}: call a function of it, or the method of that
  name of its class `Solution`;
- {"evaluate": expression, "seconds": s}, {"execute": statements, "seconds": s}: in its names."""

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
MAX_MESSAGE = 300  # characters of an exception that are told
STACK_BYTES = 64 << 20  # for programs that recurse deeply
MAX_OPEN_FILES = 64


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    configuration = json.loads(requests.readline())
    limit(configuration)
    send(replies, {"ready": True})
    for descriptor in (0, 1, 2):  # what the start itself had to say went to the real one
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
    # only a forked process comes here; it ends as any interpreter does, its output flushed
    run_as_main(program)


def limit(configuration: dict[str, Any]) -> None:
    """Limit this process and all that come from it, for good."""
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
    """Have this process killed when the one that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def at_most(kind: int, value: int | None) -> None:
    """Lower a limit, if a value is given and the limit is not lower already."""
    hard = resource.getrlimit(kind)[1]
    if value is not None and hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    if value is not None:
        resource.setrlimit(kind, (value, value))


def limit_cpu(seconds: float) -> None:
    """Let this process use so many more seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        until = min(until, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


# ----------------------------------------------------------------------------------- calls


class Program:
    """The compiled program, and the module in which it runs."""

    def __init__(self) -> None:
        self.code: types.CodeType | None = None
        self.module = types.ModuleType(MAIN)


def answer(program: Program, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request says. What the program raises is told in words."""
    names = program.module.__dict__
    try:
        limit_cpu(request["seconds"])
        if "load" in request:
            program.code = compile(request["load"], request["name"], "exec", dont_inherit=True)
            if not request["run"]:
                return {"value": None}
            sys.modules[MAIN] = program.module
            # to run what is not trusted is what this process is for: see `sandbox`
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
        return {"exception": in_words(error)}


def function_of(names: dict[str, Any], name: str) -> Any:
    """Return the function, or the method of the class `Solution`, where the program has one."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    return names[name]


def encoded(value: Any) -> Any:
    """Return a value in JSON's types. A list, text, a number, a truth value and None stand for
    themselves; other types are mappings of one key, their name."""
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


def in_words(error: BaseException) -> str:
    """Return an exception as the last line of a traceback has it. That module would cost every
    start time."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except BaseException:  # its own __str__ can raise
        return type(error).__name__


# ------------------------------------------------------------------------- standard input


def unnamed(data: bytes) -> int:
    """Return a descriptor of a new file that has no name, with this content, at its start."""
    name = os.urandom(16).hex()
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def content(descriptor: int) -> str:
    """Return what a file holds, in base64, and close it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return base64.b64encode(file.read()).decode()


def become(files: tuple[int, int, int]) -> None:
    """Make files this process's standard input, output and error."""
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(standard(0, "r")), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(standard(1, "w")), encoding="utf-8")
    errors = io.BufferedWriter(standard(2, "w"))
    sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", line_buffering=True)


def standard(descriptor: int, mode: str) -> io.FileIO:
    """Return one of the three standard files."""
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
        print(in_words(error), file=sys.stderr)
        sys.exit(1)


def send(replies: int, value: Any) -> None:
    """Write a line of JSON, however often the pipe takes only a part."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main()
