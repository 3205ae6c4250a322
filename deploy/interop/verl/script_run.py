"""The commands that a user's script starts: bash runs it in the rewards' sandbox, and records them.

The script sees no network, no file of this host but the system's programs and libraries, and no
variable but PATH, HOME and those handed in. What it writes is in memory and ends with it. In front
of some programs on its path are small ones that keep their words and end with 0.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.broker.sandbox.sandbox import Limits, ProgramOutcome, run
from slipstream.deploy.interop.verl.hydra import (
    MOST_LENGTH,
    HydraSettings,
    after_program,
    overrides_of,
)
from slipstream.deploy.interop.verl.script_text import substitutions, unset_names
from slipstream.wire.errors import ConfigError

RECORDED = ("python", "python3", "torchrun", "ray")
LIMITS = Limits(own_s=20.0, cpu_s=20.0)
_DRIVER = Path(__file__).with_name("script_driver.py")
_INSTEAD = (
    "give the command's words after --, or the YAML file that verl's command prints with "
    "--cfg job --resolve"
)
_SHOWN_LINES, _SHOWN_CHARACTERS = 3, 400  # the end of what a script printed
_COMMAND_CHARACTERS = 120
_MOST_NAMED = 20
_ENDED = {
    "timeout": "it ran for more than {0.own_s:g} s",
    "memory": "it took more than {0.memory_bytes} bytes of memory",
    "processes": "it started more than {0.max_processes} processes",
    "output": "it printed more than {0.max_output_bytes} bytes",
}


class ScriptRun(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that a script started, in their order, and how it ended."""

    commands: list[list[str]]
    code: int
    printed: str = ""  # the end of both its outputs
    unset: list[str] = []  # names that it expands although nothing sets them
    computed: list[str] = []  # $(...) in its text


def announcement(path: Path, variables: Iterable[str], limits: Limits = LIMITS) -> str:
    """Return what running a script will do and will not."""
    names = ", ".join(dict.fromkeys(("PATH", "HOME", *variables)))
    return (
        f"running {path} with bash in a sandbox, for at most {limits.own_s:g} s: without network, "
        "without files of this host but its programs and libraries, with an empty folder in memory "
        f"to write to. Its variables are {names}. {', '.join(RECORDED)} are recorded, not run"
    )


def run_script(path: Path, variables: Mapping[str, str], limits: Limits = LIMITS) -> ScriptRun:
    """Run a script in the sandbox.

    Args:
        path: The script.
        variables: All variables of its environment; PATH is the sandbox's unless it is among them.
        limits: Bounds of the run.

    Raises:
        ConfigError: The script cannot be read, there is no sandbox, or a limit ended the run.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script {path}: {error}") from error
    if len(text) > MOST_LENGTH:
        raise ConfigError(f"{path}: {len(text)} characters are no script: {MOST_LENGTH} at most")
    request = {"name": path.name, "text": text, "programs": RECORDED, "variables": variables}
    try:
        outcome = run(_DRIVER.read_text("utf-8"), stdin=msgspec.json.encode(request), limits=limits)
    except SandboxUnavailableError as error:
        raise ConfigError(
            f"{path} is not run: --run needs a sandbox, which does not start here. Instead, "
            f"{_INSTEAD}. {error.reason}"
        ) from error
    return msgspec.structs.replace(
        _script_run(path, outcome, limits),
        unset=unset_names(text, variables),
        computed=substitutions(text),
    )


def _script_run(path: Path, outcome: ProgramOutcome, limits: Limits) -> ScriptRun:
    printed = _last(outcome.stderr.decode(errors="replace"))
    if outcome.status != "ok":
        reason = _ENDED.get(outcome.status, "bash did not run").format(limits)
        raise ConfigError(
            f"{path} was ended: {reason}. It printed last: {printed}. Instead, {_INSTEAD}"
        )
    ended = msgspec.json.decode(outcome.stdout, type=ScriptRun)
    return msgspec.structs.replace(ended, printed=printed)


def _last(text: str) -> str:
    """Return the last lines as one that a terminal can show."""
    lines = " / ".join(text.strip().splitlines()[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]
    return "".join(char if char.isprintable() else " " for char in lines) or "nothing"


def settings_of(path: Path, script: ScriptRun) -> HydraSettings:
    """Return what the first command of verl's sets, with remarks on the others.

    Raises:
        ConfigError: No such command was recorded.
    """
    following = [after_program(command) for command in script.commands]
    of_verl = [overrides for overrides in following if overrides is not None]
    others = [_shown(command) for command in script.commands if after_program(command) is None]
    end = f"it ended with exit code {script.code} and printed last: {script.printed}"
    if not of_verl:
        raise ConfigError(
            f"{path} started no program of verl's, such as python3 -m verl.trainer.main_ppo. "
            f"Recorded are {', '.join(RECORDED)} by these names; recorded was "
            f"{'; '.join(others) or 'nothing'}; {end}. Instead, {_INSTEAD}"
        )
    remarks = [
        f"{path}: {command} was recorded, not run, and printed nothing" for command in others
    ]
    if len(of_verl) > 1:
        remarks.append(f"{path} starts verl {len(of_verl)} times: the first one is translated")
    if script.unset:
        remarks.append(
            f"{path} expands names that neither it nor --var NAME=VALUE sets, and that have no "
            f"value of yours: {_some(script.unset, ', ')}"
        )
    if script.computed:
        remarks.append(
            f"{path}: computed in the sandbox, so look at what they gave: "
            f"{_some([_short(command) for command in script.computed], '; ')}"
        )
    if script.code:
        remarks.append(f"{path}: {end}")
    return replace(overrides_of(of_verl[0]), remarks=tuple(remarks))


def _some(texts: Sequence[str], between: str) -> str:
    more = len(texts) - _MOST_NAMED
    shown = between.join(texts[:_MOST_NAMED])
    return f"{shown}{between}and {more} more" if more > 0 else shown


def _shown(command: Sequence[str]) -> str:
    return _short(shlex.join(command))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _COMMAND_CHARACTERS else f"{text[:_COMMAND_CHARACTERS]}..."
