"""`slipstream env try`: run trajectories in an environment, turn by turn, without a run."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream.broker.data.mixture import PromptSource
from slipstream.broker.data.sources import load_training_prompts, local_data
from slipstream.deploy.commands.options import add_config, add_json, add_overrides
from slipstream.deploy.terminal.console import make_console
from slipstream.generators.config import GeneratorSettings, generator_settings
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json, Prompt
from slipstream.wire.process.command_line import EXIT_INTERRUPTED, print_json
from slipstream.wire.process.logs import start_logging
from slipstream.wire.settings.load import load_table

if TYPE_CHECKING:
    from slipstream.generators.tools.trial import TrialMessage, TriedTrajectory

EXIT_FAILED = 1
_COLORS = {"assistant": "green", "tool": "yellow", "system": "magenta"}
EXAMPLES = """examples:
  slipstream env try my_env.py:Env --config run.toml            three prompts of [data]
  slipstream env try my_env.py:Env --model models/Qwen3-0.6B --prompt 'Guess.' --truth 7
  slipstream env try --config run.toml --n 8 --json             everything, for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("action", choices=("try",), help="what to do with the environment")
    parser.add_argument(
        "--model", metavar="FOLDER", help="model folder of the policy; default: run.model"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="a prompt to begin with, instead of those of [data]"
    )
    parser.add_argument("--truth", default="", metavar="TEXT", help="ground truth of --prompt")
    parser.add_argument("--n", type=int, default=3, metavar="N", help="trajectories to run (3)")
    add_config(parser, required=False, text="the settings of a run")
    add_json(parser)
    text = "the environment, default: environment.function; and settings that win over the file's"
    add_overrides(parser, "FILE.py:NAME|section.key=value", text)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.n < 1:
        raise ConfigError(f"--n must be at least 1, got {arguments.n}")
    words = [
        word if "=" in word else f"environment.function={word}" for word in arguments.overrides
    ]
    if arguments.model:
        words.append(f"run.model={arguments.model}")
    table = load_table(arguments.config, words)
    if not table.get("run", {}).get("name"):
        table.setdefault("run", {})["name"] = "trial"
    settings = generator_settings(table)
    if not settings.environment.is_named:
        raise ConfigError("name an environment: FILE.py:NAME, or environment.function")
    prompts = _prompts(settings, arguments)
    from slipstream.generators.tools.trial import (
        try_environment,  # tokenizers and jinja2, of an extra
    )

    start_logging("env")
    screen = _Screen(make_console(quiet=arguments.json), len(prompts))
    tried = asyncio.run(
        try_environment(
            settings, prompts, on_begin=screen.began, on_said=screen.said, on_end=screen.ended
        )
    )
    if tried is None:
        return EXIT_INTERRUPTED
    if arguments.json:
        print_json({"trajectories": tried, **summary(tried)})
    else:
        screen.summarize(tried)
    return EXIT_FAILED if any(trajectory.failed for trajectory in tried) else 0


def _prompts(settings: GeneratorSettings, arguments: argparse.Namespace) -> list[Prompt]:
    if arguments.prompt is not None:
        prompt = Prompt(prompt=arguments.prompt, ground_truth=arguments.truth)
        return [prompt] * arguments.n
    if not settings.data.file and not settings.data.sources:
        raise ConfigError("give a prompt: --prompt TEXT, or data.file")
    run = settings.run
    source: PromptSource = load_training_prompts(local_data(settings.data, run), seed=run.seed)
    return [source.at(position) for position in range(arguments.n)]


def summary(tried: "Sequence[TriedTrajectory]") -> dict[str, Json]:
    """Return the mean reward, the numbers of tokens, and why some have failed."""
    rewards = [each.reward for each in tried if each.reward is not None]
    turns = [turn for each in tried for turn in each.said]
    return {
        "count": len(tried),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "unknown_calls": sum(turn.unknown_calls for turn in turns),
        "unreadable_calls": sum(turn.unreadable_calls for turn in turns),
        "without_reward": sum(each.reward is None and not each.failed for each in tried),
        "failed": dict(Counter(each.failed for each in tried if each.failed)),
    }


class _Screen:
    """Live print of each message."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._count = count
        self._shown: list[dict[str, Json]] = []  # history as it was printed
        self._began_s = time.monotonic()

    def began(self, number: int, prompt: Prompt) -> None:
        self._shown = []
        row = f", row {prompt.row}" if prompt.row >= 0 else ""
        self._console.rule(Text(f"trajectory {number + 1} of {self._count}{row}"))

    def said(self, said: "TrialMessage") -> None:
        history = list(said.asked)
        known = self._shown
        if history[: len(known)] != known:
            known = []
            self._print("the history was rewritten: a branch begins", "bold red")
        for message in history[len(known) :]:
            self._message(message, "")
        cut = ", cut off" if said.finish_reason == "length" else ""
        self._message(said.message, f" ({said.num_tokens} tokens{cut})")
        if said.unknown_calls:
            self._print(f"calls of tools that there are not: {said.unknown_calls}", "red")
        if said.unreadable_calls:
            what = "calls that environment.tool_call_parser cannot read"
            self._print(f"{what}: {said.unreadable_calls}", "red")
        self._shown = [*history, said.message]

    def ended(self, tried: "TriedTrajectory") -> None:
        if tried.failed:
            self._print(f"failed: {tried.failed}", "red")
            return
        reward = (
            "none, it is the reward function's" if tried.reward is None else f"{tried.reward:g}"
        )
        parts = "".join(f", {name} {value:g}" for name, value in tried.parts.items())
        if tried.rewritten:
            self._print(f"the first rewritten history: {tried.rewritten}", "red")
        branches = f", {tried.num_branches} branches" if tried.num_branches > 1 else ""
        cut = ", cut off at a limit" if tried.was_cut_off else ""
        self._print(
            f"reward {reward}{parts}: {len(tried.said)} turns, {tried.num_chosen} of "
            f"{tried.num_tokens} tokens by the policy{branches}{cut}, {tried.seconds:.1f} s",
            "bold",
        )

    def summarize(self, tried: "Sequence[TriedTrajectory]") -> None:
        found = summary(tried)
        mean = "-" if found["mean"] is None else f"{found['mean']:.3f}"
        failed = sum(found["failed"].values())
        self._print(f"{len(tried)} trajectories, mean reward {mean}, {failed} failed", "")

    def _message(self, message: dict[str, Json], note: str) -> None:
        role = str(message.get("role"))
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(str(p.get("text")) for p in content)
        self._print(f"{role}{note}", f"bold {_COLORS.get(role, 'cyan')}")
        if thought := message.get("reasoning_content"):
            self._print(str(thought), "dim")
        if text:
            self._print(text, "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            self._print(f"-> {function['name']}({function['arguments']})", "yellow")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)
