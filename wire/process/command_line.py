"""The common command line of all roles."""

import argparse
import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
from typing_extensions import override

from slipstream.wire.errors import ConfigError, NameTakenError, SlipstreamError, SupersededError
from slipstream.wire.process.bytecode import write_bytecode
from slipstream.wire.process.extras import missing_library
from slipstream.wire.process.health import MAX_PORT
from slipstream.wire.process.last_words import keep_last_words_from_children, leave_last_words
from slipstream.wire.settings.load import Table, apply_overrides, load_table, section
from slipstream.wire.settings.places import with_place
from slipstream.wire.settings.sections import LoggingSection
from slipstream.wire.settings.shipped import settings_file
from slipstream.wire.settings.tenants import tenant_table

OVERRIDES_HELP = "settings that win over the file's, such as learner.lr=1e-6"
_Error = TypeVar("_Error", bound=BaseException)
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2
EXIT_SUPERSEDED = 3  # another process does this work: do not restart this one
EXIT_INTERRUPTED = 130
_MADE_BETWEEN_SEARCHES = 50_000  # objects; at Python's 700, searches take a sixth of all imports


def role_parser(
    prog: str, description: str, examples: Sequence[str], *, needs_config: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the common options of all roles."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=settings_file,
        required=needs_config,
        metavar="RUN.toml",
        help="the run's settings",
    )
    parser.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="be a role of this tenant of a pool ([tenants])",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="resolve and check the settings, print them, exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES_HELP)
    add_version(parser)
    return parser


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``."""
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version, exit")


class _ShowVersion(argparse.Action):
    """Looks the version up only when asked."""

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('slipstream')}\n")
        parser.exit()


def add_health(parser: argparse.ArgumentParser) -> None:
    """Add the option of roles that answer probes (health.py)."""
    parser.add_argument(
        "--health",
        type=port,
        default=0,
        metavar="PORT",
        help="answer probes at http://127.0.0.1:PORT/health; default 0 is off",
    )


def port(text: str) -> int:
    """Return a port of a command line; 0 for none, or for the system's choice."""
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"a port is 0 to {MAX_PORT}, not {text!r}")
    return int(text)


def own_name(chosen: str) -> str:
    """Return the name of a role: the chosen one, or a unique one."""
    return chosen or f"{socket.gethostname()}-{os.getpid()}"


def print_json(value: object) -> int:
    """Print settings or figures as JSON; return the exit code."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(text + "\n")
    return 0


def load_arguments(arguments: argparse.Namespace) -> Table:
    """Return the settings that the command line names."""
    table = load_table(arguments.config, arguments.overrides)
    if not arguments.tenant:
        return table
    table = tenant_table(table, arguments.tenant)
    own = [override for override in arguments.overrides if not override.startswith("tenants.")]
    apply_overrides(table, own)  # they win over the tenant's file, too
    return table


def log_settings(table: Table) -> LoggingSection:
    """Return [logging], the log settings of every role.

    Raises:
        ConfigError: a setting is wrong.
    """
    return section(table, "logging", LoggingSection)


@contextmanager
def naming_places(arguments: argparse.Namespace) -> Iterator[None]:
    """Add to a ConfigError where its setting was written: a file's line, or the command line.

    Args:
        arguments: Arguments, perhaps with a settings file and overrides.
    """
    try:
        yield
    except ConfigError as error:
        message = _placed(error, arguments)
        if message == str(error):
            raise
        raise ConfigError(message) from error


def _placed(error: SlipstreamError, arguments: argparse.Namespace) -> str:
    path: Path | None = getattr(arguments, "config", None)
    return with_place(str(error), path, getattr(arguments, "overrides", ()))


def settings_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the settings part of a command line, for a process with the same settings."""
    tenant = ["--tenant", arguments.tenant] if arguments.tenant else []
    return ["--config", str(arguments.config), *tenant, *arguments.overrides]


def run_role(body: Callable[[], int]) -> int:
    """Run a role's body; a known error becomes one clear line and a failing exit code.

    A missing library is a known error: the line names the extra that brings it.
    """
    keep_last_words_from_children()
    write_bytecode()
    gc.set_threshold(_MADE_BETWEEN_SEARCHES)
    try:
        return body()
    except BaseExceptionGroup as group:
        known = group.subgroup(SlipstreamError)
        if known is not None:
            return _report(_first(known))
        absent = group.subgroup(ModuleNotFoundError)
        if absent is None or (missing := missing_library(_first(absent))) is None:
            raise
        return _report(missing)
    except SlipstreamError as error:
        return _report(error)
    except ModuleNotFoundError as error:
        if (missing := missing_library(error)) is None:
            raise
        return _report(missing)
    except OSError as error:
        if (trouble := disk_trouble(error)) is None:
            raise
        return _report(trouble)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


_DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


def disk_trouble(error: OSError) -> ConfigError | None:
    """Return the error to show if a disk is full or not writable; else None."""
    if error.errno not in _DISK_TROUBLE:
        return None
    where = f" {error.filename}" if error.filename else ""
    return ConfigError(f"{error.strerror}:{where} (run.dir)")


def _first(group: BaseExceptionGroup[_Error]) -> _Error:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _report(error: SlipstreamError) -> int:
    if isinstance(error, ConfigError):
        return refuse_settings(error)
    logging.getLogger("slipstream").error("%s", error)
    has_successor = isinstance(error, SupersededError | NameTakenError)
    return EXIT_SUPERSEDED if has_successor else EXIT_FAILED


def refuse_settings(error: SlipstreamError, arguments: argparse.Namespace | None = None) -> int:
    """Print why settings were refused and where they were written; return the exit code."""
    text = str(error) if arguments is None else _placed(error, arguments)
    leave_last_words(text)
    with suppress(OSError):  # a log on a full disk
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    return EXIT_BAD_SETTINGS
