"""CPU seconds of chosen functions and of the whole process, by the kernel's clocks, in any run.

``begin`` wraps the functions and methods of some modules as these are imported: the outermost one
of a thread reads that thread's CPU clock as it begins and as it ends, a coroutine around each of
its steps. The process's CPU clock counts all threads, Python or not. Unlike the samples of a
profiler neither counts time in which a thread waits for a core. What the clocks cost themselves
(about a microsecond a call) is on the side of the functions. Generators, functions within functions
and what a program's main module defines are not wrapped.

Imports next to nothing: it is there before a process's own modules.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from typing_extensions import override

VARIABLE = "BENCHMARK_CPU_CLOCKS"  # names the folder, which holds KINDS
KINDS = "kinds.json"  # kind -> regular expression of MODULE:FUNCTION
_WRITE_S = 0.5


class Clocks:
    """CPU seconds of the outermost clocked calls of each thread, by kind."""

    def __init__(self) -> None:
        self.spent_s = Counter[str]()
        self._inside = threading.local()
        self._adding = threading.Lock()

    def run(self, kind: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401 what is called
        """Call a function on a clock, unless this thread is on one already."""
        if getattr(self._inside, "kind", ""):
            return call()
        self._inside.kind = kind
        began_s = time.thread_time()
        try:
            return call()
        finally:
            self._inside.kind = ""
            with self._adding:
                self.spent_s[kind] += time.thread_time() - began_s

    def clocked(self, kind: str, function: FunctionType) -> Callable[..., Any]:
        """Return a function on a clock; one that yields is returned as it is."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return function
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_steps(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 as it is called
                return await _Steps(self, kind, function(*args, **kwargs))

            return in_steps

        @functools.wraps(function)
        def whole(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 as it is called
            return self.run(kind, lambda: function(*args, **kwargs))

        return whole


class _Steps:
    """An awaitable that runs another one on a clock, from wait to wait."""

    def __init__(self, clocks: Clocks, kind: str, awaited: Awaitable[Any]) -> None:
        self._clocks, self._kind, self._awaited = clocks, kind, awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaited.__await__()
        following: Callable[[], Any] = functools.partial(next, steps)
        while True:
            try:
                waits_for = self._clocks.run(self._kind, following)
            except StopIteration as end:
                return end.value
            try:
                value = yield waits_for
                following = functools.partial(steps.send, value)
            except BaseException as error:  # noqa: BLE001 it is for the one that waits
                following = functools.partial(steps.throw, error)


def clock_module(clocks: Clocks, module: ModuleType, kinds: Mapping[str, str]) -> None:
    """Put the functions and methods that a module defines and a kind names on clocks."""
    for owner in [module, *_classes(module)]:
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            function = function.fget if isinstance(function, property) else function
            if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
                continue
            kind = _kind_of(f"{module.__name__}:{function.__name__}", kinds)
            if kind and name != "__new__":
                setattr(owner, name, _rewrapped(value, clocks.clocked(kind, function)))


def _classes(module: ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def _kind_of(name: str, kinds: Mapping[str, str]) -> str:
    return next((kind for kind, pattern in kinds.items() if re.match(pattern, name)), "")


def _rewrapped(value: object, function: Callable[..., Any]) -> object:
    match value:
        case staticmethod():
            return staticmethod(function)
        case classmethod():
            return classmethod(function)
        case property():
            return property(function, value.fset, value.fdel, value.__doc__)
        case _:
            return function


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module, then puts it on clocks."""

    def __init__(self, name: str, path: str, clocks: Clocks, kinds: Mapping[str, str]) -> None:
        super().__init__(name, path)
        self._clocks, self._kinds = clocks, kinds

    @override
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        clock_module(self._clocks, module, self._kinds)


@dataclass(frozen=True)
class _Finder(importlib.abc.MetaPathFinder):
    clocks: Clocks
    kinds: Mapping[str, str]

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if not any(re.match(pattern.split(":")[0], name) for pattern in self.kinds.values()):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, self.clocks, self.kinds)
        return spec


def begin(folder: str) -> None:
    """Put what is imported from here on on clocks, and write them into a folder until the end."""
    clocks, kinds = Clocks(), json.loads((Path(folder) / KINDS).read_text())
    sys.meta_path.insert(0, _Finder(clocks, kinds))

    def write() -> None:
        seconds = {"process_s": time.process_time(), "spent_s": dict(clocks.spent_s)}
        path = Path(folder) / f"{os.getpid()}.json"
        path.with_suffix(".new").write_text(json.dumps(seconds))
        path.with_suffix(".new").rename(path)

    def keep_writing() -> None:
        while True:
            write()
            time.sleep(_WRITE_S)

    def start() -> None:
        clocks.spent_s.clear()  # a forked process begins with a clock of its own
        threading.Thread(target=keep_writing, daemon=True, name="cpu-clocks").start()

    start()
    os.register_at_fork(after_in_child=start)
    atexit.register(write)
