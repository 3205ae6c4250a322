"""Structured log lines: time, level, role, and key=value pairs; one format for all roles."""

import logging
import sys
import time


class _LineFormatter(logging.Formatter):
    """``12:00:01.123 I generator-0 leased groups=3``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._role} {text}"


def start_logging(role: str, level: int = logging.INFO) -> None:
    """Send this process's log lines to standard error under the name of its role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(role))
    logging.basicConfig(level=level, handlers=[handler], force=True)
