"""Scripts that complete command lines in a shell, written from the parsers. Pure."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAIN = "slipstream"
_RUN = re.compile(r"\bRUN\b(?!\.)")  # a run folder, not RUN.toml


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command."""

    names: tuple[str, ...]
    text: str
    has_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """Words and options that one command takes."""

    text: str
    options: Sequence[Option]
    words: tuple[str, ...] = ()  # choices of its positions
    takes_run: bool = False
    commands: Mapping[str, "Command"] = field(default_factory=dict)


def command_of(parser: argparse.ArgumentParser, text: str = "") -> Command:
    """Return the words and options of a parser."""
    options: list[Option] = []
    words: list[str] = []
    takes_run = False
    commands: dict[str, Command] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands = {name: command_of(p, texts[name]) for name, p in action.choices.items()}
            continue
        choices = tuple(map(str, action.choices or ()))
        if action.option_strings:
            names = tuple(action.option_strings)
            options.append(Option(names, action.help or "", action.nargs != 0, choices))
            continue
        words += choices
        takes_run |= _RUN.search(str(action.metavar or "")) is not None
    return Command(text or parser.description or "", options, tuple(words), takes_run, commands)


def script(shell: str, programs: Mapping[str, Command]) -> str:
    """Return the script for a shell: bash, zsh or fish.

    Args:
        shell: one of SHELLS.
        programs: commands by name; ``slipstream`` has subcommands.
    """
    return SHELLS[shell](programs)


def _leaves(programs: Mapping[str, Command]) -> dict[str, Command]:
    """Return every command by its name, programs without commands included."""
    commands: dict[str, Command] = {}
    for program, command in programs.items():
        commands |= command.commands or {program: command}
    return commands


# ---- bash and zsh ----------------------------------------------------------------


def _bash(programs: Mapping[str, Command]) -> str:
    return "\n".join(
        [
            f"# bash: source <({MAIN} completion bash)",
            *_function(programs),
            f"complete -o default -F _slipstream {' '.join(programs)}\n",
        ]
    )


def _zsh(programs: Mapping[str, Command]) -> str:
    return "\n".join(
        [
            f"# zsh: source <({MAIN} completion zsh)",
            "autoload -U +X compinit && compinit -u",
            "autoload -U +X bashcompinit && bashcompinit",
            *_function(programs),
            f"complete -o default -F _slipstream {' '.join(programs)}\n",
        ]
    )


def _function(programs: Mapping[str, Command]) -> Iterator[str]:
    """Yield the function; file names complete what it leaves empty."""
    tops = [*programs[MAIN].commands, *_names(programs[MAIN])]
    yield f"""_slipstream() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[0]##*/}}" options="" words="" runs="" run i
    COMPREPLY=()
    if [[ $command == {MAIN} ]]; then
        command=""
        for ((i = 1; i < COMP_CWORD; i++)); do
            if [[ ${{COMP_WORDS[i]}} != -* ]]; then
                command="${{COMP_WORDS[i]}}"
                break
            fi
        done
        if [[ -z $command ]]; then
            COMPREPLY=($(compgen -W "{" ".join(tops)}" -- "$word"))
            return
        fi
    fi
    case "$command $before" in"""
    for name, command in _leaves(programs).items():
        free = [option for option in command.options if option.has_value and not option.choices]
        if patterns := [f'"{name} {flag}"' for option in free for flag in option.names]:
            yield f"        {' | '.join(patterns)}) return ;;"
        for option in command.options:
            if option.choices:
                patterns = [f'"{name} {flag}"' for flag in option.names]
                yield f'        {" | ".join(patterns)}) words="{" ".join(option.choices)}" ;;'
    yield '    esac\n    if [[ -z $words ]]; then\n        case "$command" in'
    for name, command in _leaves(programs).items():
        parts = [f'options="{" ".join(_names(command))}"']
        parts += [f'words="{" ".join(command.words)}"'] if command.words else []
        parts += ["runs=yes"] if command.takes_run else []
        yield f"            {name}) {' '.join(parts)} ;;"
    yield """        esac
    fi
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ -n $runs ]]; then
        for run in runs/*/; do
            run="${run%/}"
            if [[ -d $run && $run == "$word"* ]]; then
                COMPREPLY+=("$(printf %q "$run")")
            fi
        done
    fi
}"""


def _names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names if name.startswith("--")]


# ---- fish ------------------------------------------------------------------------


def _fish(programs: Mapping[str, Command]) -> str:
    lines = [f"# fish: {MAIN} completion fish | source"]
    for program, command in programs.items():
        if not command.commands:
            lines += _fish_lines(program, "", command)
            continue
        for name, subcommand in command.commands.items():
            text = _fish_text(subcommand.text)
            lines.append(f"complete -c {program} -n __fish_use_subcommand -f -a {name} -d {text}")
            lines += _fish_lines(program, f"__fish_seen_subcommand_from {name}", subcommand)
        lines += _fish_lines(program, "__fish_use_subcommand", command)
    return "\n".join(lines) + "\n"


def _fish_lines(program: str, condition: str, command: Command) -> Iterator[str]:
    start = f"complete -c {program}" + (f" -n '{condition}'" if condition else "")
    for option in command.options:
        flags = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
        )
        value = " -r" if option.has_value else ""
        if option.choices:
            value = f" -x -a '{' '.join(option.choices)}'"
        yield f"{start} {flags}{value} -d {_fish_text(option.text)}"
    if command.words:
        yield f"{start} -a '{' '.join(command.words)}'"
    if command.takes_run:
        yield f"{start} -a '(for run in runs/*/; string trim --right --chars=/ -- $run; end)'"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[[Mapping[str, Command]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
