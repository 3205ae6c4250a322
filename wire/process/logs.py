"""Log lines of all roles: time with its zone, level, role, text; one format everywhere."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from typing_extensions import override

from slipstream.wire.process.safe_text import visible
from slipstream.wire.settings.sections import LoggingSection

_tenant: ContextVar[str] = ContextVar("tenant", default="")


@contextmanager
def logging_for(tenant: str) -> Iterator[None]:
    """Name a tenant in the lines of a block, and of the tasks that it starts."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def start_logging(role: str, settings: LoggingSection | None = None) -> None:
    """Send this process's log lines to standard error under the name of its role.

    A line looks like ``2026-03-01T12:00:01.123+01:00 I generator-0 adopted v1.7``, or is an object
    of JSON. Work for one of several tenants is logged as that of ``generator-0/TENANT``.

    Args:
        role: name of this process.
        settings: level and format; None for their defaults.
    """
    settings = settings or LoggingSection()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(role) if settings.format == "json" else _Line(role))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def _named(role: str) -> str:
    tenant = _tenant.get()
    return f"{role}/{tenant}" if tenant else role


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC).astimezone()
    return moment.isoformat(timespec="milliseconds")


class _Line(logging.Formatter):
    """Shows control characters as text: a log is read in a terminal."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    @override
    def format(self, record: logging.LogRecord) -> str:
        said = super().format(record)
        return visible(f"{_time_of(record)} {record.levelname[0]} {_named(self._role)} {said}")


class _Json(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "role": _named(self._role),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
