"""`slipstream align`: where learner, SGLang and transformers part, on the same tokens.

The same random tokens pass the learner's ranks as the settings divide them, an engine of one rank
and transformers. Printed is how far they are apart at each layer's attention, choice of experts and
MLP, and in the log-probabilities; the first point that is apart by more than --tolerance is named.
All of it runs on this host's CPU. Of a run the settings are taken, with run.model as it began.
Quantized weights are those that the learner makes of them, for all three.
"""

import argparse
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w
from rich.console import Console
from rich.text import Text

from slipstream.deploy.commands.options import add_json, add_overrides
from slipstream.deploy.launch.ranks import run_ranks
from slipstream.deploy.preflight.align.compare import (
    PairComparison,
    PointDifference,
    compare,
    whole,
)
from slipstream.deploy.terminal.console import make_console, plain_table
from slipstream.generators.config import generator_settings
from slipstream.generators.tools.align import record, recording_flags
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.model.division import refuse_layout
from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.files.fetched import is_hub_name
from slipstream.wire.files.run_folder import SETTINGS
from slipstream.wire.models.alignment import DEQUANTIZED, TOKENS
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.models.model_files import refuse_no_model
from slipstream.wire.process.command_line import EXIT_INTERRUPTED, print_json
from slipstream.wire.process.extras import missing_marks, refuse_missing
from slipstream.wire.process.stopping import heeded_signals
from slipstream.wire.settings.load import Table as Settings
from slipstream.wire.settings.load import load_table

EXAMPLES = """examples:
  slipstream align Qwen/model                                a model's folder, one rank, float32
  slipstream align Qwen/model learner.ranks=2 learner.tensor_parallel=2
  slipstream align runs/mine                                 as a run's settings divide it
  slipstream align run.toml --without engine                 learner and transformers alone
"""
LEARNER, ENGINE, TRANSFORMERS = "learner", "engine", "transformers"
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
_SHORTEST = 3  # tokens of a sequence
_MOST_TOKENS = 1 << 16  # all sequences: the outputs of their layers are kept
_FEWER = 5  # tokens of each sequence than of the one before it

_Arrays = dict[str, np.ndarray[Any, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    text = "a run folder, its run.toml, or a model folder"
    parser.add_argument("model", type=Path, metavar="RUN|MODEL", help=text)
    text = "number of sequences, default 4"
    parser.add_argument("--sequences", type=int, default=4, metavar="N", help=text)
    text = "tokens of the longest sequence, default 32"
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help=text)
    text = "seed that chooses the tokens, default 0"
    parser.add_argument("--seed", type=int, default=0, help=text)
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference: nats of log-probabilities, shares of other points; by default "
        + ", ".join(f"{value:g} of {name}" for name, value in _TOLERANCE.items()),
    )
    parser.add_argument(
        "--without",
        action="append",
        choices=(ENGINE, TRANSFORMERS),
        default=[],
        help="one that is not compared; may be given twice",
    )
    add_json(parser)
    add_overrides(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if two of them are apart."""
    if arguments.sequences < 1 or arguments.tokens < _SHORTEST:
        raise ConfigError(
            f"--sequences must be at least 1 and --tokens at least {_SHORTEST}, got "
            f"{arguments.sequences} and {arguments.tokens}"
        )
    if set(arguments.without) == {ENGINE, TRANSFORMERS}:
        raise ConfigError("--without engine and transformers leaves nothing to compare with")
    if arguments.tolerance is not None and not 0 <= arguments.tolerance < math.inf:
        raise ConfigError(f"--tolerance must be a number from 0, got {arguments.tolerance}")
    for number in heeded_signals():
        signal.signal(number, lambda _signum, _frame: sys.exit(EXIT_INTERRUPTED))
    with tempfile.TemporaryDirectory(prefix="sp-align-") as name:
        folder = Path(name)
        settings_file = _settings_file(arguments.model, folder)
        table = load_table(settings_file, arguments.overrides)
        learner = learner_settings(table)
        hf = load_hf_config(learner.model)
        refuse_layout(hf, learner.learner)
        has_engine = ENGINE not in arguments.without
        refuse_missing(missing_marks("learner", *(["generators"] if has_engine else [])))
        _refuse_lengths(arguments, hf)
        dtype = "bfloat16" if learner.learner.dtype == "bfloat16" else "float32"
        sequences = chosen_tokens(
            hf.vocab_size, arguments.sequences, arguments.tokens, arguments.seed
        )
        (folder / TOKENS).write_text(json.dumps(sequences))
        console = make_console(stderr=True)
        found: dict[str, _Arrays] = {}
        with console.status("the learner's ranks") as status:
            found[LEARNER] = _of_learner(learner, settings_file, arguments.overrides, folder)
            model = learner.model
            if hf.quantization_config is not None:
                model = folder / DEQUANTIZED
                table["run"]["model"] = str(model)
            if TRANSFORMERS not in arguments.without:
                status.update("transformers")
                found[TRANSFORMERS] = _of_transformers(model, folder, dtype)
            if ENGINE not in arguments.without:
                status.update("SGLang")
                found[ENGINE] = _of_engine(table, hf, sequences, folder, dtype)
    tolerance = _TOLERANCE[dtype] if arguments.tolerance is None else arguments.tolerance
    names = [name for name in (LEARNER, ENGINE, TRANSFORMERS) if name in found]
    results = [
        compare((first, found[first]), (second, found[second]), tolerance=tolerance)
        for first, second in itertools.combinations(names, 2)
    ]
    if arguments.json:
        print_json({"tolerance": tolerance, "comparisons": results})
    else:
        print_comparisons(results, tolerance, make_console())
    return int(any(result.first_apart is not None for result in results))


def _refuse_lengths(arguments: argparse.Namespace, hf: HfConfig) -> None:
    """Refuse sequences that the model has no positions for, or too many to be compared here."""
    if arguments.tokens > hf.max_position_embeddings:
        raise ConfigError(
            f"--tokens must be at most max_position_embeddings = {hf.max_position_embeddings} of "
            f"run.model, got {arguments.tokens}"
        )
    if arguments.sequences * arguments.tokens > _MOST_TOKENS:
        raise ConfigError(
            f"--sequences times --tokens must be at most {_MOST_TOKENS}, got {arguments.sequences} "
            f"and {arguments.tokens}"
        )


def chosen_tokens(vocab_size: int, count: int, longest: int, seed: int) -> list[list[int]]:
    """Return sequences of random tokens, of unlike lengths."""
    draw = random.Random(seed)  # noqa: S311 not secret
    lengths = [max(_SHORTEST, longest - _FEWER * number) for number in range(count)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def print_comparisons(
    results: Sequence[PairComparison], tolerance: float, console: Console
) -> None:
    """Print every point of every pair, then the verdicts."""
    table = plain_table("point", *(f"{result.one} - {result.other}" for result in results))
    values = [{point.point: point for point in result.points} for result in results]
    for name in max(map(list, values), key=len):
        table.add_row(name, *(_cell(points.get(name)) for points in values))
    console.print(table)
    console.print(
        "nats of logprobs at most; share of tokens with other experts; of outputs the root mean "
        "square of the difference as a share of theirs",
        style="dim",
    )
    for result in results:
        pair, first = f"{result.one} and {result.other}", result.first_apart
        if first is None:
            console.print(f"{pair} agree to {tolerance:g}", style="green")
        else:
            console.print(f"{pair} part at {first.point}: {first.value:.1e}", style="bold red")
        if result.alone:
            what = f"{len(result.alone)} points, such as {result.alone[0]}"
            console.print(f"{pair}: {what}, were recorded of one alone", style="yellow")


def _cell(point: PointDifference | None) -> Text:
    if point is None:
        return Text("-")
    text = f"{point.value:.1%}" if point.point.endswith("experts") else f"{point.value:.1e}"
    return Text(text, style="" if point.is_within else "bold red")


def _settings_file(given: Path, folder: Path) -> Path:
    """Return the settings of a run, or write those of a model's folder."""
    if given.suffix == ".toml":
        return given
    if (given / SETTINGS).is_file():
        return given / SETTINGS
    is_named = is_hub_name(str(given))
    if not is_named:
        refuse_no_model(given, f"a run has {SETTINGS}")
    path = folder / "model.toml"
    table = {
        "run": {
            "name": "align",
            "dir": str(folder),
            "model": str(given if is_named else given.resolve()),
        },
        "learner": {"dtype": "float32"},
    }
    path.write_text(tomli_w.dumps(table))
    return path


def _of_learner(
    settings: LearnerSettings, file: Path, overrides: Sequence[str], folder: Path
) -> _Arrays:
    ranks = settings.learner.ranks
    run_ranks("slipstream.learner.tools.align", folder, file, overrides, ranks)
    tokens = msgspec.json.decode((folder / TOKENS).read_bytes(), type=list[list[int]])
    arrays = [_read(folder / f"learner.{rank}.npz") for rank in range(ranks)]
    return whole(arrays, sum(map(len, tokens)))


def _of_transformers(model: Path, folder: Path, dtype: str) -> _Arrays:
    module = "slipstream.deploy.preflight.align.reference"
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-m", module, str(model), str(folder), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise SlipstreamError(f"transformers ended with code {done.returncode}: {lines[-1]}")
    return _read(folder / "transformers.npz")


def _of_engine(
    table: Settings, hf: HfConfig, sequences: Sequence[Sequence[int]], folder: Path, dtype: str
) -> _Arrays:
    outputs = folder / "engine"
    outputs.mkdir()
    longest = max(map(len, sequences))
    generators = {
        **table.get("generators", {}),
        "device": "cpu",
        "dtype": dtype,
        "sglang": recording_flags(hf.num_hidden_layers, outputs),
    }
    changed = {
        **table,
        "run": {**table["run"], "dir": str(folder)},
        "generators": generators,
        "sampling": {"max_prompt_tokens": longest, "max_response_tokens": 1},
    }
    return record(generator_settings(changed), sequences, outputs)


def _read(path: Path) -> _Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
