"""`slipstream import-verl`: write the settings of a run that verl's command describes.

Takes the command's words after --, the YAML file of its whole configuration, or with --run a shell
script, and writes one TOML file. A report has every key: kept, renamed, changed in meaning, dropped
with its reason, or unknown. Where verl's default differs from Slipstream's, verl's is written. With
an unknown key nothing is written and the exit code is 1, unless --allow-unknown.

--run has bash run the script in a sandbox (bubblewrap): no network, no files of this host but its
programs, writes to memory alone, no variables but PATH, HOME and those of --var. python, python3,
torchrun and ray are recorded in place of being run. Without a sandbox no script is run.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tomli_w

from slipstream.deploy.commands.options import add_json
from slipstream.deploy.config import run_config
from slipstream.deploy.interop.verl.hydra import (
    MOST_DEPTH,
    HydraSettings,
    after_program,
    joined,
    of_file,
    overrides_of,
)
from slipstream.deploy.interop.verl.rows import TranslatedKey
from slipstream.deploy.interop.verl.script_run import announcement, run_script, settings_of
from slipstream.deploy.interop.verl.translate import Translation, translate
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replace_file

EXAMPLES = """examples:
  slipstream import-verl --out run.toml -- python3 -m verl.trainer.main_ppo data.seed=1 ...
  slipstream import-verl outputs/.hydra/config.yaml --out run.toml
  slipstream import-verl --run run_grpo.sh --out run.toml        what the script starts
  slipstream import-verl --run run_grpo.sh --var NNODES=2        with a variable that it reads
  slipstream import-verl --run run_grpo.sh trainer.nnodes=1      further keys, over the script's
"""
# Bounds of a YAML file; events are keys, values and brackets.
_MOST_CHARACTERS, _MOST_EVENTS = 1 << 18, 20_000
_FORMS = (
    "expected a command after --, such as -- python3 -m verl.trainer.main_ppo "
    "data.train_files=a.parquet, a .yaml file, or --run SCRIPT"
)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_TITLES = {
    "unknown": "not translated",
    "changed": "changed in meaning, or written because verl's default differs",
    "renamed": "renamed",
    "kept": "kept",
    "dropped": "dropped",
}
_COLORS = {"unknown": "bold red", "changed": "yellow", "renamed": "green", "kept": "green"}


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    keys: list[TranslatedKey] = msgspec.field(name="told")
    todo: list[str]
    notes: list[str]
    written: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "overrides",  # the name under which words after an option are joined to it
        nargs="*",
        metavar="COMMAND|FILE",
        help="the words of a command after --, or a .yaml file; then further keys",
    )
    parser.add_argument(
        "--run", type=Path, metavar="SCRIPT", help="run a shell script in a sandbox, and read that"
    )
    parser.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the script's environment; repeatable",
    )
    parser.add_argument("--out", type=Path, metavar="RUN.toml", help="file to write, not stdout")
    parser.add_argument("--force", action="store_true", help="write over --out if it is there")
    parser.add_argument(
        "--allow-unknown", action="store_true", help="write what is known, and exit with 0"
    )
    parser.add_argument(
        "--async",
        dest="is_async",
        action="store_true",
        help="let generators go ahead of the learner, where verl's wait (run.mode)",
    )
    add_json(parser, "the report as JSON, on stderr as well")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if a key is not translated."""
    out: Path | None = arguments.out
    if out is not None and out.exists() and not arguments.force:
        raise ConfigError(f"{out} exists already: give another --out, or --force to write over it")
    given = _given(arguments)
    found = translate(
        given, home=str(Path.home()), vocab_size=vocab_size_of(given), is_async=arguments.is_async
    )
    writes = arguments.allow_unknown or not found.failed
    if writes:
        text = toml_text(found)
        if out is None:
            sys.stdout.write(text)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, text.encode(), mode=0o600)  # a key may hold a secret
    where = "" if not writes else "stdout" if out is None else str(out)
    notes = [*found.notes, *(refusal_of(found) if writes else [])]
    if arguments.json:
        report = _Report(keys=found.keys, todo=found.todo, notes=notes, written=where)
        sys.stderr.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_report(found, notes, where)
    return 0 if writes else 1


def _given(arguments: argparse.Namespace) -> HydraSettings:
    script: Path | None = arguments.run
    if script is None:
        if arguments.var:
            raise ConfigError("--var sets a variable of a script: --run SCRIPT is missing")
        return read(arguments.overrides)
    variables = {"HOME": str(Path.home()), **variables_of(arguments.var)}
    if not arguments.json:
        console = make_console(stderr=True, highlight=False)
        console.print(announcement(script, variables), soft_wrap=True)
    return joined(
        settings_of(script, run_script(script, variables)), overrides_of(arguments.overrides)
    )


def variables_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables that --var sets.

    Raises:
        ConfigError: A text is not NAME=VALUE.
    """
    variables = {}
    for text in texts:
        match = _VARIABLE.fullmatch(text)
        if match is None:
            raise ConfigError(f"--var {text}: expected NAME=VALUE, such as --var NNODES=2")
        variables[match[1]] = match[2]
    return variables


def read(words: Sequence[str]) -> HydraSettings:
    """Return the keys that a command's words, or the YAML file that the first one names, give.

    Raises:
        ConfigError: The words are neither, or the file cannot be read.
    """
    if not words:
        raise ConfigError(f"something to read is required: {_FORMS}")
    path, first = Path(words[0]), words[0].split()
    is_file = "=" not in words[0] and len(words[0]) < 4096 and path.is_file()
    if is_file and path.suffix in {".yaml", ".yml"}:
        return joined(of_file(_yaml(path), str(path)), overrides_of(words[1:]))
    if is_file:
        raise ConfigError(
            f"{path} is no .yaml file. A script is run in a sandbox, and what it starts is read: "
            f"slipstream import-verl --run {path}"
        )
    if (
        len(words) == 1
        and len(first) > 1
        and ("=" not in first[0] or "=" in words[0][len(first[0]) :])
    ):
        raise ConfigError(f"a command in quotes is one word: leave the quotes out. {_FORMS}")
    following = after_program(words)
    if following is None and "=" not in words[0].partition(" ")[0]:
        raise ConfigError(f"{words[0]} is no file, and no command of verl's: {_FORMS}")
    return overrides_of(words if following is None else following)


def _yaml(path: Path) -> object:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path}: YAML is read by PyYAML: pip install pyyaml") from error
    try:
        text = path.read_text("utf-8")
        if len(text) > _MOST_CHARACTERS:
            raise ConfigError(f"{path} holds more than {_MOST_CHARACTERS} characters")
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{path} has an alias (*{event.anchor}): none are read")
            if depth > MOST_DEPTH:
                raise ConfigError(f"{path} is nested more than {MOST_DEPTH} deep")
            if count > _MOST_EVENTS:
                raise ConfigError(f"{path} holds more than {_MOST_EVENTS} keys and values")
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def vocab_size_of(given: HydraSettings) -> int:
    """Return the size of the model's vocabulary if its folder is here, else 0."""
    path = given.values.get("actor_rollout_ref.model.path")
    file = Path(str(path)).expanduser() / "config.json"
    try:
        size = json.loads(file.read_text("utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0
    return size if isinstance(size, int) else 0


def toml_text(found: Translation) -> str:
    """Return the file, with what is left to do in front of it."""
    head = ["# Written by slipstream import-verl, which says what became of every key of verl's."]
    if found.todo:
        head += ["# Left to do:", *(f"#   {line}" for line in found.todo)]
    if found.failed:
        head += ["# Not translated:", *(f"#   {key.key}: {key.remark}" for key in found.failed)]
    lines = [line for text in head for line in text.splitlines()]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(found.table)


def refusal_of(found: Translation) -> list[str]:
    """Return what `slipstream run` would refuse in the file, if it would."""
    try:
        run_config(found.table)
    except ConfigError as error:
        return [f"slipstream run would still refuse it: {error}"]
    return []


def print_report(found: Translation, notes: Sequence[str], where: str) -> None:
    """Print what became of every key, the worst last."""
    console = make_console(stderr=True, highlight=False)
    for kind in reversed(_TITLES):
        keys = [key for key in found.keys if key.kind == kind]
        if not keys:
            continue
        style = _COLORS.get(kind, "dim")
        console.print(f"{_TITLES[kind]} ({len(keys)})", style=style)
        for key in keys:
            console.print(
                f"  {line_of(key)}", soft_wrap=True, style="dim" if kind == "dropped" else ""
            )
    for title, texts in (("notes", notes), ("left to do", found.todo)):
        if texts:
            console.print(title, style="bold")
        for text in texts:
            console.print(f"  {text}", soft_wrap=True)
    if where:
        file = "run.toml" if where == "stdout" else where
        console.print(f"next: slipstream run --config {file} --dry-run", soft_wrap=True)
    else:
        console.print(
            f"nothing is written: {len(found.failed)} keys are not translated (--allow-unknown "
            "leaves them out)",
            soft_wrap=True,
            style="bold red",
        )


def line_of(key: TranslatedKey) -> str:
    """Return one line on one key."""
    value = "" if key.value is None else f"={plain(key.value)}"
    default = " (verl's default)" if key.is_default else ""
    settings = ", ".join(
        f"{name} left out" if setting is None else f"{name} = {plain(setting)}"
        for name, setting in key.settings.items()
    )
    arrow = f" -> {settings}" if settings else ""
    return f"{key.key}{value}{default}{arrow}" + (f": {key.remark}" if key.remark else "")


def plain(value: object) -> str:
    """Return a value as TOML has it."""
    text = (
        tomli_w.dumps({"v": value}).removeprefix("v = ")
        if not isinstance(value, dict)
        else str(value)
    )
    return " ".join(text.split()).replace("[ ", "[").replace(", ]", "]")
