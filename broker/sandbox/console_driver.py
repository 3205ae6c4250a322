"""Runs one piece of code after the other in the same names. Runs in the sandbox.

A script with the standard library only, which ``console.py`` has the sandbox run as ``main.py``. A
request is a line of JSON on stdin: source, and a mark that is written to stdout after the output of
the code, its error included.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import sys
import traceback

TYPE_CHECKING = False  # importing typing takes a tenth of our time
if TYPE_CHECKING:
    from typing import Any


def run(source: str, name: str, names: dict[str, Any]) -> None:
    """Run source in these names; print the value of an expression at its end."""
    linecache.cache[name] = (len(source), None, f"{source}\n".splitlines(keepends=True), name)
    try:
        statements = ast.parse(source, name).body
        last = statements[-1] if statements else None
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements[:-1], []), name, "exec"), names)  # noqa: S102 the purpose
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)  # noqa: S307
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
        else:
            exec(compile(ast.Module(statements, []), name, "exec"), names)  # noqa: S102
    except BaseException as error:  # noqa: BLE001 it may exit
        begun = error.__traceback__
        while begun is not None and begun.tb_frame.f_code.co_filename != name:
            begun = begun.tb_next  # frames of ours
        lines = traceback.format_exception(type(error), error, begun)
        sys.stderr.write("".join(lines))


def main() -> None:
    """Serve requests until there are no more."""
    ours = os.getpid()
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)  # in order of time, as on a terminal
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    loads, write, getpid, leave = json.loads, os.write, os.getpid, os._exit
    for number, line in enumerate(requests, 1):
        request = loads(line)
        run(request["source"], f"<call {number}>", names)
        if getpid() != ours:
            leave(0)  # a fork that the code has made
        for stream in {
            id(stream): stream for stream in (*streams, sys.stdout, sys.stderr)
        }.values():
            try:
                stream.flush()
            except Exception:  # noqa: BLE001, S112 the code may have closed it
                continue
        write(replies, request["mark"].encode())


if __name__ == "__main__":
    main()
