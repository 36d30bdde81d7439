"""`code`: a program passes its tests, run in a sandbox.

The program is the completion's last block in a fence (```python, ```py or no language). The gold
holds the tests: see `tasks/grading/code_tests.py` for its three forms. The program is told inputs
only, and what it makes of them is compared outside the sandbox, so that a program that reads,
changes or ends whatever is around it learns nothing of the expected results and cannot report any.

One interpreter serves all tests of a program: standard input is given to a fork of it for each
test; calls and assertions are asked one after the other, and a new interpreter follows on one that
was stopped. A program over its limits is `wrong`; a sandbox that fails is an `error`. A signal that
ends a program may come from outside: the test is repeated, once in a program. What ends it again is
taken for the program's own doing, and is `wrong`.

Left out: languages other than Python; judges that are programs; a mark for style or speed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.common.clock import RunningClock
from tasks.common.params import ParamsError, at_least
from tasks.grading import code_results, code_tests
from tasks.grading.asserts import Assertion
from tasks.grading.blocks import last_block
from tasks.grading.code_results import shown
from tasks.grading.code_tests import AssertTests, CallTests, StdinTests, Tests
from tasks.grading.sandbox import SENT, Killed, Session, Stopped, output_of, require, signal_words
from tasks.grading.sandbox_command import Kind, Sandbox, SandboxError
from tasks.grading.verdict import Verdict

ANSWERS = True

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
CLOCK_FACTOR = 3  # a test may take so many times its CPU time on the clock
NAME = "<program>"


@dataclass(frozen=True)
class Settings:
    """How a program is run; see `verify`."""

    sandbox: Sandbox
    seconds: float
    total_seconds: float
    float_tolerance: float | None
    stop_at_failure: bool
    prelude: str


def ready(settings: Mapping[str, Any]) -> None:
    """Raise ParamsError if the sandbox does not work here, or limits make no sense."""
    at_least(1, memory_mb=settings["memory_mb"])
    if not 0 < settings["seconds"] <= settings["total_seconds"]:
        raise ParamsError(
            f"`seconds` {settings['seconds']} and `total_seconds` {settings['total_seconds']} are "
            "no limits of a test and a program: set 0 < seconds <= total_seconds"
        )
    require(Sandbox(settings["sandbox"], settings["memory_mb"], settings["packages"]))


def verify(
    completion: str,
    answer: str,
    *,
    language: Literal["python"],
    sandbox: Kind,
    seconds: float,
    total_seconds: float,
    memory_mb: int,
    packages: bool,
    prelude: str,
    float_tolerance: float | None,
    other_asserts: Literal["refuse", "run"],
    stop_at_failure: bool,
) -> Verdict:
    """`correct` if all tests pass; `partial` is the share that do. Otherwise `wrong`, with the
    first test that fails and why; `unparsed` without a block of code.

    `seconds` of CPU time are a test's limit, and three times as much on the clock; `total_seconds`
    on the clock are the program's, after which the rest of its tests fail. `prelude` is run before
    programs that are called. Assertions that cannot be judged outside make the gold an error, or
    run beside the program (`other_asserts`)."""
    tests = code_tests.read_gold(answer)
    if isinstance(tests, AssertTests) and other_asserts == "refuse":
        refuse_others(tests)
    program = last_block(completion, LANGUAGES)
    if program is None:
        return Verdict("unparsed", "")
    chosen = Settings(
        Sandbox(sandbox, memory_mb, packages),
        *(seconds, total_seconds, float_tolerance, stop_at_failure, prelude),
    )
    return verdict_of(Execution(program, tests, chosen).failures(), number_of(tests))


def canonical_completion(answer: str) -> None:
    """Return None: the gold holds tests, and no program that passes them."""


def refuse_others(tests: AssertTests) -> None:
    """Raise ValueError for a statement that can only be executed beside the program."""
    others = [one.source for one in tests.statements if one.test is None]
    if others:
        raise ValueError(
            f"the test {others[0][:80]!r} can only run beside the program, which could defeat it; "
            "set `other_asserts: run` to use it all the same"
        )


def number_of(tests: Tests) -> int:
    """Return how many tests there are."""
    return len(tests.statements if isinstance(tests, AssertTests) else tests.inputs)


def verdict_of(failures: Iterator[str | None], number: int) -> Verdict:
    """Return the verdict on a program: `failures` says for each test what went wrong, or None."""
    passed = 0
    first = ""
    for index, failure in enumerate(failures, 1):
        passed += failure is None
        if failure is not None and not first:
            first = f"test {index} of {number}: {failure}"
    outcome = "correct" if passed == number else "wrong"
    return Verdict(outcome, first or f"{number} tests passed", passed / number)


class Execution:
    """One program and its tests. `session` is the interpreter that has loaded the program, if one
    has."""

    def __init__(self, program: str, tests: Tests, settings: Settings) -> None:
        self.program = program
        self.tests = tests
        self.settings = settings
        self.session: Session | None = None
        self.clock = RunningClock()
        self.deadline = math.inf
        self.was_killed = False

    def failures(self) -> Iterator[str | None]:
        """Yield what went wrong in each test, or None where nothing did. A program that cannot be
        loaded fails all of them."""
        self.deadline = self.clock.look() + self.settings.total_seconds
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
        """Return what went wrong in one test, or None. After the first kill it is repeated, and the
        time before that does not count."""
        since = self.clock.look()
        try:
            return self.attempt(index)
        except Killed:
            self.was_killed = True
            self.deadline += self.clock.look() - since
            return self.attempt(index)

    def attempt(self, index: int) -> str | None:
        """Return what went wrong in one test, or None. Raises Killed the first time that it is."""
        if self.clock.look() >= self.deadline:
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
        """Raise the first kill again, and SandboxError for a second one that came from outside."""
        if isinstance(error, Killed) and not self.was_killed:
            raise error
        if isinstance(error, Killed) and error.outside:
            raise SandboxError(f"the sandbox was killed twice: {error}") from error

    def load(self) -> None:
        """Start an interpreter and load the program. Raises CannotLoad when it ends or raises
        there."""
        self.session = Session(self.settings.sandbox, self.clock)
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
        """Return the reply to one request, within a test's limits."""
        assert self.session is not None
        seconds = self.settings.seconds
        clock = min(CLOCK_FACTOR * seconds, self.deadline - self.clock.look())
        return self.session.ask({**request, "seconds": seconds}, max(clock, 0.0))

    def judge(self, index: int) -> str | None:
        """Return what went wrong in one test of the program that is loaded."""
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
        """Return what went wrong in an assertion."""
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
        except Exception as error:  # what is compared is the program's, of any type
            return f"wrong answer: {type(error).__name__} in {shown(statement.source)}"
        values = ", ".join(shown(value) for value in answers.values())
        return None if holds else f"wrong answer: {values} in {shown(statement.source)}"

    def stop(self) -> None:
        """End the interpreter, if there is one."""
        if self.session is not None:
            self.session.close()
            self.session = None


class CannotLoad(Exception):
    """The program ends or raises before a test can be asked of it; the message says how."""


def exception_in(reply: dict[str, Any]) -> str | None:
    """Return the failure that a reply tells of, or None for one with a value."""
    if "value" in reply:
        return None
    said = reply.get("exception")
    if not isinstance(said, str):
        return "it wrote something else in place of its result"
    return f"{'memory limit' if 'MemoryError' in said else 'exception'}: {said[:400]}"


def value_in(reply: dict[str, Any]) -> Any:
    """Return the value in a reply. Raises Stopped for one that nobody but the program wrote."""
    try:
        return code_results.decoded(reply["value"])
    except Exception as error:  # it can be of any form
        raise Stopped(f"its result cannot be read ({error})"[:200]) from error


def judge_result(
    reply: dict[str, Any], tests: CallTests, index: int, tolerance: float | None
) -> str | None:
    """Return what is wrong with a function's result, or None."""
    if (failure := exception_in(reply)) is not None:
        return failure
    value, wanted = value_in(reply), tests.outputs[index]
    try:
        if code_results.same_result(value, wanted, tests.wrapped, tolerance):
            return None
    except Exception as error:  # too deep, too large
        return f"wrong answer: {type(error).__name__} in comparing it with {shown(wanted)}"
    return f"wrong answer: {shown(value)}, not {shown(wanted)}"


def judge_output(reply: dict[str, Any], wanted: str, tolerance: float | None) -> str | None:
    """Return what is wrong with a program's end or output, or None."""
    status = reply.get("status")
    output, errors = output_of(reply.get("stdout")), output_of(reply.get("stderr"))
    if not isinstance(status, int) or output is None or errors is None:
        return "it wrote something else in place of its result"
    if status != 0:
        return ending(status, errors)
    if code_results.same_output(output, wanted, tolerance):
        return None
    return f"wrong answer: {shown(output)}, not {shown(wanted)}"


def ending(status: int, errors: str) -> str:
    """Return in words how a program ended, from its wait status and standard error. Raises Killed
    where that can have come from outside."""
    last = (errors.strip().splitlines() or [""])[-1][-300:]
    if number := status & 0x7F:
        words = signal_words(number) or "it was stopped"
        if number in SENT:
            raise Killed(words, outside=False)
        return words
    if "MemoryError" in last:
        return f"memory limit: {last}"
    if "File too large" in last:
        return f"output limit: {last}"
    return f"exception: status {status >> 8}, {last}"
