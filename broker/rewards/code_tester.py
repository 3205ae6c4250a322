"""Tests an answer's functions from a process that the answer cannot reach. Runs in the sandbox.

A script, the standard library only; ``code.py`` has the sandbox run it as ``main.py`` with the
answer next to it. Two processes:

    tester    reads the tests from stdin and writes the results, a line of JSON each, to stdout
    answer    started by the tester as ``main.py --answer``: loads the answer, follows the tester

The answer's process never holds a test, an expected value or a descriptor of the tester, and
sends plain data: only results of its functions. The tester is not dumpable, which closes its
memory and descriptors in /proc. An answer that ends or hangs is restarted.

A test is a call (its result is written, and compared outside) or statements (whether they passed
is written). In statements, names of the answer refer to what lives in its process; values that
are no plain data stay there and can be called and asked for attributes, items and iteration.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # importing typing takes a tenth of our time
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 pathlib is slow to import
_REQUESTS, _REPLIES = 3, 4  # descriptors of the answer's process
_MOST_BYTES = 1 << 20  # size of one reply
_LOAD_S = 60.0  # time to start Python, besides a test's time
_POLL_S = 0.05
_WANTS_CORE, _WAITS_FOR_DISK = b"R", b"D"
_DISK_SHARE = 0.5  # share of a test's time, granted besides for waits for a disk
_MOST_PROCESSES = 64  # processes of an answer
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class AnswerError(Exception):
    """The answer raised an error of its own, ended, hung, or sent invalid data."""


# ---- values between the two ----------------------------------------------------


def encode(value: Any, keep: dict[int, Any] | None = None) -> Any:  # noqa: ANN401
    """Return plain data as JSON with tagged containers; anything else is kept here, by number.

    Raises:
        TypeError: there is no such data, and nowhere to keep it.
    """
    if type(value) in _PLAIN:
        return value
    for name, container in _CONTAINERS.items():
        if isinstance(value, container):
            return [name, [encode(item, keep) for item in container.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, keep), encode(v, keep)] for k, v in dict.items(value)]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    for kind in (int, float, str):
        if isinstance(value, kind):  # an instance of the answer's own class
            return kind(value)
    if isinstance(value, RemoteValue):
        return ["kept", value._number]
    if keep is None:
        raise TypeError(f"cannot pass a {type(value).__name__} to the answer's functions")
    keep[len(keep)] = value
    return ["kept", len(keep) - 1]


def decode(data: Any, kept: Any) -> Any:  # noqa: ANN401
    """Return the value given to ``encode``; ``kept`` makes a value of a number."""
    if not isinstance(data, list):
        if type(data) not in _PLAIN:
            raise AnswerError("expected plain data")
        return data
    tag, content = data
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(item, kept) for item in content)
    match tag:
        case "dict":
            return {decode(key, kept): decode(value, kept) for key, value in content}
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
        case "kept":
            return kept(int(content))
    raise AnswerError(f"expected plain data, got a {tag!r}")


# ---- the tester ----------------------------------------------------------------


class AnswerProcess:
    """The process that holds the answer, as the tester sees it."""

    def __init__(self, test_s: float) -> None:
        self._test_s = test_s
        self._pid = 0
        self._requests = self._replies = -1
        self._clock_left_s = self._disk_left_s = 0.0
        self._last_s = self._last_cpu_s = 0.0
        self._states: set[bytes] = set()
        self.names: list[str] = []

    def begin_test(self) -> None:
        """Start the clock of a test, and the process if it does not run."""
        if not self._pid:
            self._start()
            self._set_clock(self._test_s + _LOAD_S)
            names = self.ask({"do": "names"}).get("names")
            if not isinstance(names, list):
                raise AnswerError("expected names")
            self.names = [name for name in names if isinstance(name, str)]
        self._set_clock(self._test_s)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply; an answer that gives none by the deadline ends."""
        if not self._pid:
            raise AnswerError("it has ended")
        try:
            data = json.dumps(request).encode() + b"\n"
            while data:
                self._wait([], [self._requests])
                data = data[os.write(self._requests, data) :]
            reply = json.loads(self._line())
        except (OSError, ValueError, RecursionError, AnswerError) as error:
            self.stop()
            raise AnswerError(str(error)) from error
        if not isinstance(reply, dict):
            self.stop()
            raise AnswerError("expected a reply")
        return reply

    def operate(self, operation: str, target: Any, arguments: list[Any], named: Any = None) -> Any:  # noqa: ANN401
        """Do something with a name or a kept value of the answer; lists that it changed change."""
        given = [encode(item) for item in arguments]
        request = {"do": operation, "of": target, "arguments": given, "named": {}}
        request["named"] = {name: encode(value) for name, value in (named or {}).items()}
        reply = self.ask(request)
        if "raised" in reply:
            raise known_exception(str(reply["raised"]), str(reply.get("text", "")))
        try:
            after = [decode(item, self._remote) for item in reply.get("arguments", [])]
            value = decode(reply["value"], self._remote)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise AnswerError("expected plain data") from error
        for old, new in zip(arguments, after, strict=False):
            replace_content(old, new)
        return value

    def stop(self) -> None:
        """End the process."""
        if self._pid:
            os.close(self._requests)
            os.close(self._replies)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _remote(self, number: int) -> RemoteValue:
        return RemoteValue(self, number)

    def _start(self) -> None:
        nothing = os.open("/dev/null", os.O_RDWR)
        read, self._requests = os.pipe()
        self._replies, write = os.pipe()
        os.set_blocking(self._requests, False)
        # Through high numbers, so that no copy overwrites a descriptor still to be copied.
        high = {nothing: 100, read: 101, write: 102}
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in high.items()]
        actions += [(os.POSIX_SPAWN_DUP2, 100, number) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, 101, _REQUESTS), (os.POSIX_SPAWN_DUP2, 102, _REPLIES)]
        actions += [(os.POSIX_SPAWN_CLOSE, number) for number in (100, 101, 102)]
        options = ["-I", "-B", "-X", "int_max_str_digits=0"]
        command = [sys.executable, *options, os.path.abspath(__file__), "--answer"]  # noqa: PTH100
        self._pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)  # noqa: TID251
        for descriptor in (nothing, read, write):
            os.close(descriptor)

    def _set_clock(self, left_s: float) -> None:
        self._clock_left_s, self._disk_left_s = left_s, _DISK_SHARE * left_s
        self._last_s, self._last_cpu_s, _ = self._usage()
        self._states = {_WANTS_CORE}

    def _usage(self) -> tuple[float, float, set[bytes]]:
        """Return now, and of the answer and all that it started processor seconds and states."""
        ticks, states, pids = 0, set(), [self._pid]
        for pid in pids:
            try:
                # Ended children are included.
                ticks += sum(map(int, stat_of(f"/proc/{pid}/stat")[11:15]))
                folder = f"/proc/{pid}/task"
                for task in os.listdir(folder):  # noqa: PTH208 pathlib is slow to import
                    states.add(stat_of(f"{folder}/{task}/stat")[0])
                    if len(pids) < _MOST_PROCESSES:
                        with open(f"{folder}/{task}/children", "rb") as file:  # noqa: PTH123
                            pids += map(int, file.read().split())
            except (OSError, IndexError):  # it has ended, or the kernel lists no children
                continue
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), states

    def _wait(self, reads: list[int], writes: list[int]) -> None:
        """Wait for a pipe for as long as the answer has; others' use of the machine is not its.

        As in ``broker/sandbox/charged_time.py``: where the answer wants a core, its CPU time
        counts, and waiting for a disk counts as that for a while.
        """
        while not any(select.select(reads, writes, [], min(_POLL_S, self._clock_left_s))[:2]):
            now_s, cpu_s, states = self._usage()
            elapsed, both = now_s - self._last_s, states | self._states
            used = min(elapsed, max(0.0, cpu_s - self._last_cpu_s))
            if _WANTS_CORE in both:
                self._clock_left_s -= used
            else:
                spared = min(elapsed - used, self._disk_left_s) if _WAITS_FOR_DISK in both else 0.0
                self._disk_left_s -= spared
                self._clock_left_s -= elapsed - spared
            self._last_s, self._states = now_s, states
            self._last_cpu_s = max(cpu_s, self._last_cpu_s)
            if self._clock_left_s <= 0:
                raise AnswerError("it took too long")

    def _line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            self._wait([self._replies], [])
            new = os.read(self._replies, 65536)
            if not new or len(data) > _MOST_BYTES:
                raise AnswerError("it ended" if not new else "it sent too much")
            data += new
        return data


def stat_of(path: str) -> list[bytes]:
    """Return the fields of a process or thread in /proc, from its state on."""
    with open(path, "rb") as file:  # noqa: PTH123 pathlib is slow to import
        return file.read().rpartition(b")")[2].split()


class RemoteValue:
    """A value that lives in the answer's process."""

    __slots__ = ("_answer", "_number")

    def __init__(self, answer: AnswerProcess, number: int | str) -> None:
        self._answer, self._number = answer, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401, D102
        return self._answer.operate("call", self._number, list(arguments), named)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return self._answer.operate("attribute", self._number, [name])

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        return self._answer.operate("item", self._number, [key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._answer.operate("list", self._number, []))

    def __len__(self) -> int:
        length = int(self._answer.operate("length", self._number, []))
        if length != len(self._answer.operate("list", self._number, [])):
            raise TypeError("the answer's object has another length than items")
        return length

    def __bool__(self) -> bool:
        raise TypeError("the answer's objects are neither true nor false here")

    def __eq__(self, other: object) -> bool:  # type: ignore[explicit-override] # costs an import
        raise TypeError("the answer's objects cannot be compared here")

    __hash__ = None  # type: ignore[assignment] # incomparable values cannot be keys


def known_exception(name: str, text: str) -> Exception:
    """Return a built-in exception by its name, or an AnswerError."""
    kind = getattr(builtins, name, None)
    ours = (AssertionError, StopIteration, StopAsyncIteration)  # have a meaning to a test
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ours):
        try:
            return kind(text)
        except TypeError:  # its constructor needs more arguments
            return AnswerError(name)
    return AnswerError(f"{name}: {text}")


def replace_content(old: Any, new: Any) -> None:  # noqa: ANN401
    """Make a list, dict or set be as the answer left it."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)


def names_for_tests(answer: AnswerProcess, function: str = "") -> dict[str, Any]:
    """Return the answer's names for the tests. Built-ins and modules are always ours.

    Of its own names that is ``function`` alone, where one is given: any other that a test uses and
    does not define, such as a function that compares, would be the answer's word for itself.

    Names with two leading underscores are Python's own, such as the built-ins by which a statement
    finds ``abs``: an answer that claims to have one does not get it.
    """
    visible: dict[str, Any] = {}
    for name in answer.names:
        if name in sys.stdlib_module_names:
            try:
                visible[name] = importlib.import_module(name)
            except Exception:  # noqa: BLE001, S112 a module with a missing dependency
                continue
        elif name.startswith("__") or hasattr(builtins, name):
            continue
        elif name == function or not function:
            visible[name] = RemoteValue(answer, name)
    return visible


def run_calls(answer: AnswerProcess, tests: dict[str, Any]) -> None:
    """Call the function with each list of arguments; write the results."""
    for index, arguments in enumerate(tests["calls"]):
        try:
            answer.begin_test()
            target = tests["function"]
            if target not in answer.names and "Solution" in answer.names:
                target = f"Solution.{target}"
            reply = answer.operate("call", target, arguments)
            send({"test": index, "value": encode(reply)})
        except Exception as error:  # noqa: BLE001 an answer may raise anything
            send({"test": index, "error": f"{type(error).__name__}: {error}"[:500]})


def run_statements(answer: AnswerProcess, tests: dict[str, Any]) -> None:
    """Run test texts, each in names of its own; write of each test if it passed."""
    index = 0
    for text in tests["texts"]:
        names: dict[str, Any] | None = None
        whole = True  # nothing that the others depend on has failed
        for statement, is_test in split(text):
            error = ""
            try:
                answer.begin_test()
                if names is None:
                    names = {**names_for_tests(answer, tests["function"]), "__name__": "tests"}
                    names["__builtins__"] = builtins
                if whole:
                    code = compile(ast.Module([statement], []), "tests", "exec")
                    exec(code, names)  # noqa: S102 the purpose of tests
                else:
                    error = "an earlier statement has failed"
            except BaseException as problem:  # noqa: BLE001 a test may exit
                error = f"{type(problem).__name__}: {problem}"[:500] or "failed"
                whole = whole and is_test
            if is_test:
                send({"test": index, "error": error} if error else {"test": index, "passed": True})
                index += 1


def split(text: str) -> list[tuple[ast.stmt, bool]]:
    """Return the statements of a text, and whether each is a test.

    Every assertion at the top is one; a text without, such as one that ends with
    ``check(function)``, is a single test: its last statement.
    """
    statements = ast.parse(text).body
    tests = {id(statement) for statement in statements if isinstance(statement, ast.Assert)}
    tests = tests or {id(statement) for statement in statements[-1:]}
    return [(statement, id(statement) in tests) for statement in statements]


def has_test(text: str) -> bool:
    """True if a text asserts something, or ends with a statement that may: no bare definition.

    Raises:
        SyntaxError: it is no Python.
    """
    statements = ast.parse(text).body
    if not statements or any(isinstance(statement, ast.Assert) for statement in statements):
        return bool(statements)
    last = statements[-1]
    calls = any(isinstance(node, ast.Call) for node in ast.walk(last))
    return calls and isinstance(last, ast.Expr | ast.For | ast.While | ast.With | ast.Try | ast.If)


def send(message: dict[str, Any]) -> None:
    """Write a line for the process that compares."""
    try:
        line = json.dumps(message)
    except (ValueError, RecursionError):
        line = json.dumps({"test": message["test"], "error": "its result cannot be written"})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ---- the answer's process ------------------------------------------------------


def serve() -> NoReturn:
    """Load the answer and serve the tester's requests, until it closes the pipe."""
    names: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    with open(os.path.join(_FOLDER, "answer.py"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        source = file.read()
    requests = os.fdopen(_REQUESTS, "rb")
    dumps, loads, write, leave = json.dumps, json.loads, os.write, os._exit
    exec(compile(source, "answer.py", "exec"), names)  # noqa: S102 our purpose
    kept: dict[int, Any] = {}
    for line in requests:
        reply = dumps(fulfil(loads(line), names, kept)).encode() + b"\n"
        while reply:
            reply = reply[write(_REPLIES, reply) :]
    leave(0)


def fulfil(request: dict[str, Any], names: dict[str, Any], kept: dict[int, Any]) -> dict[str, Any]:
    """Do one thing; return the reply."""
    if request["do"] == "names":
        return {"names": [name for name in names if not name.startswith("__")]}
    try:
        target = find(request["of"], names, kept)
        arguments = [decode(item, kept.__getitem__) for item in request["arguments"]]
        named = {key: decode(item, kept.__getitem__) for key, item in request["named"].items()}
        value = operations()[request["do"]](target, *arguments, **named)
        reply: dict[str, Any] = {"value": encode(value, kept)}
        if request["do"] == "call":
            reply["arguments"] = [encode(item, kept) for item in arguments]
        json.dumps(reply)  # or it is no reply
    except Exception as error:  # noqa: BLE001 it is the answer's
        return {"raised": type(error).__name__, "text": str(error)[:1000]}
    return reply


def find(target: str | int, names: dict[str, Any], kept: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return the target: a name, a method of a fresh object, or a kept value."""
    if isinstance(target, int):
        return kept[target]
    owner, dot, method = target.partition(".")
    return getattr(names[owner](), method) if dot else names[target]


def operations() -> dict[str, Any]:
    """Return the operations on a value."""
    return {
        "call": lambda value, *arguments, **named: value(*arguments, **named),
        "attribute": getattr,
        "item": lambda value, key: value[key],
        "list": list,
        "length": len,
    }


# ---- start ---------------------------------------------------------------------


def main() -> None:
    """Be the tester, or the answer."""
    if "--answer" in sys.argv:
        serve()
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    tests = json.loads(sys.stdin.buffer.read())
    answer = AnswerProcess(tests["test_s"])
    (run_calls if "calls" in tests else run_statements)(answer, tests)
    answer.stop()


if __name__ == "__main__":
    main()
