"""`code`: a program passes its tests, run in a sandbox.

The program is the last fenced block of the completion (```python, ```py or no language). The gold
contains the tests, in a form described in `tasks/grading/programs/golds.py`. The program
receives only inputs, and its results are compared outside the sandbox. A program that inspects,
changes or kills the process around it therefore cannot learn or report the expected results.

One interpreter serves all tests of a program: each test with standard input runs in a fork of it;
calls and assertions are evaluated one after the other. A new interpreter replaces a stopped one. A
program over its limits is `wrong`; a failing sandbox is an `error`. A signal that kills a program
may come from outside, so the test is repeated, once per program. A second kill fails the test, or
is an `error` if the program cannot have sent the signal.

Not supported: languages other than Python; judges that are programs; a score for style or speed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tasks.common.params import ParamsError, at_least
from tasks.common.processes.clock import RunningClock
from tasks.grading.programs import golds, results
from tasks.grading.programs.asserts import Assertion
from tasks.grading.programs.blocks import last_block
from tasks.grading.programs.command import Kind, Sandbox, SandboxError
from tasks.grading.programs.golds import AssertTests, CallTests, StdinTests, Tests
from tasks.grading.programs.results import shown
from tasks.grading.programs.sandbox import (
    KILLS,
    Killed,
    Session,
    Stopped,
    output_of,
    problem,
    signal_message,
)
from tasks.grading.verdict import Verdict

ANSWERS = True
canonical_completion = None  # the gold contains tests, not a program that passes them

LANGUAGES = {"", "python", "python3", "py"}
EXAMPLE = """
code:
  method: code
  language: python
  sandbox: bubblewrap  # or process: no protection from hostile programs
  seconds: 4.0  # of CPU time a test
  total_seconds: 60.0  # on the clock, all tests of a program
  memory_mb: 1024
  packages: false  # true: not only the standard library
  prelude: from typing import *
  float_tolerance: null
  other_asserts: refuse  # run: also tests that a hostile program could defeat
  stop_at_failure: false
"""
CLOCK_FACTOR = 3  # wall-clock limit of a test, as a multiple of its CPU time limit
NAME = "<program>"


@dataclass(frozen=True)
class Settings:
    """The settings of `code`. `prelude` runs before the program, except for stdin tests.
    `other_asserts`: refuse or run assertions that can only run in the program's process."""

    language: Literal["python"]
    sandbox: Kind
    seconds: float  # of CPU time per test, and three times as much on the clock
    total_seconds: float  # on the clock per program, after which its remaining tests fail
    memory_mb: int
    packages: bool
    prelude: str
    float_tolerance: float | None
    other_asserts: Literal["refuse", "run"]
    stop_at_failure: bool

    def __post_init__(self) -> None:
        at_least(1, memory_mb=self.memory_mb)
        if not 0 < self.seconds <= self.total_seconds:
            raise ParamsError(
                f"`seconds` {self.seconds} and `total_seconds` {self.total_seconds} are not "
                "limits of a test and a program: set 0 < seconds <= total_seconds"
            )

    @property
    def place(self) -> Sandbox:
        """The sandbox with its limits."""
        return Sandbox(self.sandbox, self.memory_mb, self.packages)


@cache
def ready(settings: Settings) -> None:
    """Raise ParamsError if the sandbox does not work on this machine, or `prelude` fails in it."""
    if (reason := problem(settings.place)) is not None:
        raise ParamsError(
            f"the sandbox {settings.sandbox!r} does not work here: {reason}. Install bubblewrap "
            "(Debian: apt-get install bubblewrap) and, unless root runs this, allow unprivileged "
            "user namespaces; a container must be allowed to make namespaces. Or set "
            "`sandbox: process`, which does not protect from hostile programs"
        )
    (reason,) = Execution("", golds.read_gold('{"asserts": ["pass"]}'), settings).failures()
    if settings.prelude and reason is not None:
        raise ParamsError(
            f"`prelude` {settings.prelude!r} does not run: {reason}. Correct it, or set `packages: "
            "true` if it needs a package of this environment"
        )


def verify(completion: str, answer: str, settings: Settings) -> Verdict:
    """Return `correct` if all tests pass, otherwise `wrong` with the first failing test and the
    reason; `unparsed` without a code block. `partial` is the share of passed tests."""
    tests = golds.read_gold(answer)
    if isinstance(tests, AssertTests) and settings.other_asserts == "refuse":
        refuse_others(tests)
    program = last_block(completion, LANGUAGES)
    if program is None:
        return Verdict("unparsed", "")
    return verdict_of(Execution(program, tests, settings).failures(), number_of(tests))


def refuse_others(tests: AssertTests) -> None:
    """Raise ValueError for a statement that can only be executed in the program's process."""
    others = [one.source for one in tests.statements if one.test is None]
    if others:
        raise ValueError(
            f"the test {others[0][:80]!r} can only run beside the program, which could defeat it; "
            "set `other_asserts: run` to use it all the same"
        )


def number_of(tests: Tests) -> int:
    return len(tests.statements if isinstance(tests, AssertTests) else tests.inputs)


def verdict_of(failures: Iterator[str | None], number: int) -> Verdict:
    """Return the verdict on a program. `failures` yields the reason for each failed test, and None
    for each passed test."""
    passed = 0
    first = ""
    for index, failure in enumerate(failures, 1):
        passed += failure is None
        if failure is not None and not first:
            first = f"test {index} of {number}: {failure}"
    outcome = "correct" if passed == number else "wrong"
    return Verdict(outcome, first or f"{number} tests passed", passed / number)


class Execution:
    """One program and its tests. `session` is the interpreter that has loaded the program, or
    None."""

    def __init__(self, program: str, tests: Tests, settings: Settings) -> None:
        self.program = program
        self.tests = tests
        self.settings = settings
        self.session: Session | None = None
        self.clock = RunningClock()
        self.deadline = self.clock.read() + settings.total_seconds
        self.was_killed = False

    def failures(self) -> Iterator[str | None]:
        """Yield the failure of each test, or None if it passed. Stop after the first failure if
        `stop_at_failure` is set, and in any case if the program cannot be loaded."""
        try:
            for index in range(number_of(self.tests)):
                try:
                    failure = self.outcome(index)
                except CannotLoad as error:
                    yield str(error)
                    return
                yield failure
                if failure is not None and self.settings.stop_at_failure:
                    return
        finally:
            self.stop()

    def outcome(self, index: int) -> str | None:
        """Return the reason for the failure of one test, or None. After the first kill the test is
        repeated, and the time of its first run does not count."""
        since = self.clock.read()
        try:
            return self.attempt(index)
        except Killed:
            self.was_killed = True
            self.deadline += self.clock.read() - since
            return self.attempt(index)

    def attempt(self, index: int) -> str | None:
        """Return the reason for the failure of one test, or None. The first kill raises Killed."""
        if self.clock.read() >= self.deadline:
            return f"time limit: all tests together, {self.settings.total_seconds:g} s on the clock"
        try:
            if self.session is None:
                self.load()
            return self.judge(index)
        except Stopped as error:
            self.stop()
            self.check_kill(error)
            return str(error)

    def check_kill(self, error: Stopped) -> None:
        """Reraise the program's first kill. Raise SandboxError for a second kill from outside."""
        if isinstance(error, Killed) and not self.was_killed:
            raise error
        if isinstance(error, Killed) and error.outside:
            raise SandboxError(f"the sandbox was killed twice: {error}") from error

    def load(self) -> None:
        """Start an interpreter and load the program. Raise CannotLoad if the program ends or raises
        while loading."""
        self.session = Session(self.settings.place, self.clock)
        request = {
            "load": self.program,
            "name": NAME,
            "run": not isinstance(self.tests, StdinTests),
            "before": self.settings.prelude,
        }
        try:
            reply = self.ask(request)
            if exception_in(reply) is None and isinstance(self.tests, AssertTests):
                reply = self.ask({"execute": self.tests.setup})
        except Stopped as error:
            self.check_kill(error)
            raise CannotLoad(str(error)) from error
        if (failure := exception_in(reply)) is not None:
            raise CannotLoad(failure)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request, within the limits of a test."""
        assert self.session is not None
        seconds = self.settings.seconds
        clock = min(CLOCK_FACTOR * seconds, self.deadline - self.clock.read())
        return self.session.ask({**request, "seconds": seconds}, max(clock, 0.0))

    def judge(self, index: int) -> str | None:
        """Return the reason for the failure of one test of the loaded program, or None."""
        tolerance = self.settings.float_tolerance
        if isinstance(self.tests, StdinTests):
            reply = self.ask({"stdin": self.tests.inputs[index]})
            return judge_output(reply, self.tests.outputs[index], tolerance)
        if isinstance(self.tests, CallTests):
            arguments = self.tests.inputs[index]
            reply = self.ask({"call": self.tests.function, "arguments": arguments})
            return judge_result(reply, self.tests, index, tolerance)
        return self.judge_assertion(self.tests.statements[index])

    def judge_assertion(self, statement: Assertion) -> str | None:
        """Return the reason for the failure of an assertion, or None."""
        if statement.test is None:
            return exception_in(self.ask({"execute": statement.source}))
        answers = {}
        for question in statement.questions:
            reply = self.ask({"evaluate": question})
            if (failure := exception_in(reply)) is not None:
                return failure
            answers[question] = value_in(reply)
        try:
            holds = statement.holds(answers)
        except Exception as error:  # the program's value can be of any type
            return f"wrong answer: {type(error).__name__} in {shown(statement.source)}"
        values = ", ".join(shown(value) for value in answers.values())
        return None if holds else f"wrong answer: {values} in {shown(statement.source)}"

    def stop(self) -> None:
        """Stop the interpreter, if there is one."""
        if self.session is not None:
            self.session.close()
            self.session = None


class CannotLoad(Exception):
    """Raised if the program ends or raises before its first test; the message is the reason."""


def exception_in(reply: dict[str, Any]) -> str | None:
    """Return the failure in a reply, or None for a reply with a value."""
    if "value" in reply:
        return None
    message = reply.get("exception")
    if not isinstance(message, str):
        return "it wrote something else in place of its result"
    return f"{'memory limit' if 'MemoryError' in message else 'exception'}: {message[:400]}"


def value_in(reply: dict[str, Any]) -> Any:
    """Return the value in a reply. Raise Stopped if it cannot be decoded, because then the program
    itself has written it."""
    try:
        return results.decoded(reply["value"])
    except Exception as error:  # the reply can have any form
        raise Stopped(f"its result cannot be read ({error})"[:200]) from error


def judge_result(
    reply: dict[str, Any], tests: CallTests, index: int, tolerance: float | None
) -> str | None:
    """Return what is wrong with a function's result, or None."""
    if (failure := exception_in(reply)) is not None:
        return failure
    value, wanted = value_in(reply), tests.outputs[index]
    try:
        if results.same_result(value, wanted, tests.wrapped, tolerance):
            return None
    except Exception as error:  # too deep, too large
        return f"wrong answer: {type(error).__name__} in comparing it with {shown(wanted)}"
    return f"wrong answer: {shown(value)}, not {shown(wanted)}"


def judge_output(reply: dict[str, Any], expected: str, tolerance: float | None) -> str | None:
    """Return what is wrong with a program's exit status or output, or None."""
    status = reply.get("status")
    output, errors = output_of(reply.get("stdout")), output_of(reply.get("stderr"))
    if not isinstance(status, int) or output is None or errors is None:
        return "it wrote something else in place of its result"
    if status != 0:
        return ending(status, errors)
    if results.same_output(output, expected, tolerance):
        return None
    return f"wrong answer: {shown(output)}, not {shown(expected)}"


def ending(status: int, errors: str) -> str:
    """Describe how a program ended, from its wait status and standard error. Raise Killed if the
    signal may have come from outside."""
    last = (errors.strip().splitlines() or [""])[-1][-300:]
    if number := status & 0x7F:
        words = signal_message(number) or "it was stopped"
        if number in KILLS:
            raise Killed(words, outside=False)
        return words
    if "MemoryError" in last:
        return f"memory limit: {last}"
    if "File too large" in last:
        return f"output limit: {last}"
    return f"exception: status {status >> 8}, {last}"
