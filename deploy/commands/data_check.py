"""`slipstream data check`: check prompt files as a run would read them."""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.progress import track
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.broker.config import DataSection, RewardSection
from slipstream.broker.data.files import row_name
from slipstream.broker.data.sources import (
    Source,
    eval_sources,
    load_source,
    local_data,
    local_eval,
    training_sources,
)
from slipstream.broker.reward_worker.choice import RewardReading, is_missing, read_rows
from slipstream.deploy.commands.options import add_config, add_overrides
from slipstream.deploy.preflight.check.trial import gives_all_rewards, odd_shapes
from slipstream.deploy.terminal.console import make_console
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.settings.load import load_table, section
from slipstream.wire.settings.sections import (
    EnvironmentSection,
    EvalSection,
    RunSection,
    SamplingSection,
    model_folder,
)

if TYPE_CHECKING:
    from slipstream.generators.text.codec import TextCodec

_SHOWN_ROWS = 10
_SHOWN_CHARACTERS = 1500
EXIT_BAD_ROWS = 1
EXAMPLES = """examples:
  slipstream data check train.parquet --model MODEL      rows, lengths and problems of prompts
  slipstream data check --config run.toml                of all files of a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("action", choices=("check",), help="what to do with the prompts")
    text = "a file of prompts, default: all of the run; and settings that win over the file's"
    add_overrides(parser, "FILE|section.key=value", text)
    add_config(parser, required=False, text="the run's settings; default: all defaults")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model whose tokenizer counts, named as in run.model, which is the default",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the contents of a file, or of all files in a run's settings; return the exit code.

    Raises:
        ConfigError: a file or setting that cannot be read at all, or that a reward refuses.
    """
    config: Path | None = arguments.config
    overrides = [word for word in arguments.overrides if "=" in word]
    files = [Path(word) for word in arguments.overrides if "=" not in word]
    if len(files) > 1 or not (files or config or overrides):
        raise ConfigError("give one FILE, or the settings of a run with --config RUN.toml")
    table = load_table(config or Path(os.devnull), overrides)
    sampling = section(table, "sampling", SamplingSection)
    data, run = section(table, "data", DataSection), section(table, "run", RunSection)
    run = msgspec.structs.replace(run, model=arguments.model or run.model)
    if files:
        data = msgspec.structs.replace(data, file=str(files[0]), sources={})
        sources = training_sources(data)
    else:
        evaluation = local_eval(section(table, "eval", EvalSection), run)
        sources = [*training_sources(local_data(data, run)), *eval_sources(evaluation)]
    codec = _codec(model_folder(run), sampling) if run.model else None
    reward = section(table, "reward", RewardSection)
    environment = section(table, "environment", EnvironmentSection)
    reports = [_inspect(source, data, codec, sampling) for source in sources]
    console = make_console()
    for report in reports:
        if not gives_all_rewards(environment, reward):
            _read(report, reward)
        _show(report, sampling, console, in_tokens=codec is not None)
    bad = sum(len(report.bad) for report in reports)
    if sampling.overlong_prompts == "error":
        bad += sum(len(report.overlong) for report in reports)
    fate = "skipped" if data.on_bad_row == "skip" else "would end a run"
    verdict = f"bad rows: {bad:,} ({fate})" if bad else "no bad rows"
    unread = sum(len(reading.unread) for report in reports for reading in report.unread)
    if unread:
        fate = "would be tried broker.max_attempts times and dropped"
        if environment.is_named:
            fate += ", unless the environment gives the reward"
        verdict = f"rows that no reward reads: {unread:,} ({fate})" + f"; {verdict}" * bool(bad)
    console.print(Text(verdict, style="red" if bad or unread else "green"))
    return EXIT_BAD_ROWS if bad or (unread and not environment.is_named) else 0


@dataclass(slots=True)
class SourceReport:
    """Contents of one source."""

    source: Source
    num_rows: int
    prompts: list[Prompt]
    bad: list[tuple[str, str]]  # (row, reason): ends a run, or is skipped by data.on_bad_row
    overlong: list[tuple[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # ascending
    remarks: list[str] = field(default_factory=list)  # harmless to a run
    unread: list[RewardReading] = field(default_factory=list)  # rows that no reward reads
    example: str = ""

    @property
    def data_sources(self) -> Counter[str]:
        """Number of prompts of each data source."""
        return Counter(prompt.data_source for prompt in self.prompts)

    @property
    def num_truths(self) -> int:
        """Number of prompts with a ground truth."""
        return sum(prompt.ground_truth is not None for prompt in self.prompts)


def _codec(folder: Path, sampling: SamplingSection) -> "TextCodec":
    from slipstream.generators.text.codec import TextCodec  # tokenizers, which is an extra's

    return TextCodec(folder, sampling)


def _inspect(
    source: Source, data: DataSection, codec: "TextCodec | None", sampling: SamplingSection
) -> SourceReport:
    loaded = load_source(source, data, keep_going=True, reads_pixels=True)
    bad = list(loaded.bad_rows)
    report = SourceReport(source, len(loaded.prompts) + len(bad), loaded.prompts, bad)
    report.remarks = odd_shapes(loaded.prompts)
    if not report.num_truths:
        rows = "row that can be read" if bad else "row"
        report.remarks.append(
            f"no {rows} has a ground truth; the columns are {', '.join(loaded.columns)}: "
            "data.ground_truth_column names the one that holds it"
        )
    report.example = loaded.prompts[0].text
    if codec is None:
        report.lengths = sorted(len(prompt.text) for prompt in loaded.prompts)
        return report
    from slipstream.generators.text.codec import BadPromptError

    for prompt in loaded.prompts:
        file = source.table.file
        row = row_name(Path(file), prompt.row) if file else f"row {prompt.row}"
        try:
            length = len(codec.tokens(prompt))
        except BadPromptError as error:
            report.bad.append((row, error.why))
            continue
        report.lengths.append(length)
        if length > sampling.max_prompt_tokens:
            why = f"{length} tokens, sampling.max_prompt_tokens is {sampling.max_prompt_tokens}"
            report.overlong.append((row, why))
    report.lengths.sort()
    with suppress(ConfigError):
        report.example = codec.text(loaded.prompts[0])
    return report


def _images(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return what was read of images; empty without any."""
    shown = {image.digest: image for prompt in prompts for image in prompt.images}
    if not shown:
        return {}
    total = sum(len(prompt.images) for prompt in prompts)
    size = sum(image.num_bytes for image in shown.values())
    largest = max(shown.values(), key=lambda image: image.width * image.height)
    return {
        "images": f"{total:,}, {len(shown):,} different ones of {size / 1e6:,.1f} MB, up to "
        f"{largest.width} x {largest.height}"
    }


def _read(report: SourceReport, reward: RewardSection) -> None:
    """Have the rewards read their rows."""
    console = make_console(stderr=True)
    title = f"reading the rows of {report.source.setting}"
    rows = track(
        report.prompts, title, console=console, transient=True, disable=not console.is_terminal
    )
    try:
        report.unread = read_rows(reward, rows)
    except ConfigError as error:
        if not is_missing(error):
            raise
        report.remarks.append(f"no reward has read its rows: {error}")


def _show(
    report: SourceReport, sampling: SamplingSection, console: Console, *, in_tokens: bool
) -> None:
    lengths, quantiles = report.lengths, "-"
    if lengths:
        last = len(lengths) - 1
        quantiles = (
            f"min {lengths[0]:,}  median {lengths[last // 2]:,}  "
            f"p90 {lengths[round(0.9 * last)]:,}  max {lengths[-1]:,}"
        )
    unit = "tokens" if in_tokens else "characters"
    table = RichTable(show_header=False, title=Text(report.source.origin), title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    rows = {
        "setting": report.source.setting,
        "rows": f"{report.num_rows:,}",
        "bad": f"{len(report.bad):,}",
        f"prompt {unit}": quantiles,
        "ground truths": f"{report.num_truths:,}",
        **_images(report.prompts),
        "data sources": ", ".join(f"{n} {c:,}" for n, c in report.data_sources.most_common(20)),
    }
    if in_tokens:
        what = {
            "error": "end the run",
            "drop": "are dropped",
            "truncate": "lose their first tokens",
        }
        rows["too long"] = f"{len(report.overlong):,} ({what[sampling.overlong_prompts]})"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)
    for remark in report.remarks:
        console.print(Text(f"note: {remark}", style="yellow"), soft_wrap=True)
    for reading in report.unread:
        console.print(Text(reading.found, style="red"), soft_wrap=True)
    for title, problems in (("bad", report.bad), ("too long", report.overlong)):
        for row, reason in problems[:_SHOWN_ROWS]:
            console.print(Text(f"{title}: {row}: {reason}"))
        if len(problems) > _SHOWN_ROWS:
            console.print(f"{title}: {len(problems) - _SHOWN_ROWS:,} more")
    title = "first prompt, as the model gets it" if in_tokens else "first prompt"
    shown = report.example[:_SHOWN_CHARACTERS]
    if len(report.example) > _SHOWN_CHARACTERS:
        shown += f"\n... {len(report.example) - _SHOWN_CHARACTERS:,} more characters"
    console.print(Panel(Text(shown), title=title, title_align="left"))
