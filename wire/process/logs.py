"""Log lines of all roles: time, level, role, text; one format everywhere."""

import logging
import sys

from typing_extensions import override

from slipstream.wire.process.visible import visible


def start_logging(role: str, level: int = logging.INFO) -> None:
    """Send this process's log lines to standard error under the name of its role.

    A line looks like ``12:00:01.123 I generator-0 adopted v1.7``.
    """
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname).1s {role} %(message)s"
    handler.setFormatter(_Visible(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _Visible(logging.Formatter):
    """Shows control characters as text: a log is read in a terminal."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
