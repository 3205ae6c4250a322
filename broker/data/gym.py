"""Data sets that reasoning-gym generates, by name."""

import ast
import difflib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from slipstream.broker.data.files import RawRow
from slipstream.broker.data.plain import BadRowError, plain
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

NAME_KEY = "reasoning_gym"
ENTRY_KEY = "entry"
OPTIONS_KEY = "options"
_TRIES = 20  # problems looked at for each that is not among others
Verifier = Callable[[str, dict[str, Json]], float]
_COMPARES_TUPLES = ("arc_agi", "rearc")
_EVALUATE_ANSWERS = {
    "algorithmic": ("binary_matrix", "number_sorting", "spiral_matrix", "string_insertion"),
    "games": ("n_queens",),
}
# Imports of reasoning-gym, by package, and the data sets that need them.
_OPTIONAL = {
    "matplotlib": (
        "matplotlib",
        "matplotlib.pyplot",
        "matplotlib.animation",
        "matplotlib.collections",
        "mpl_toolkits",
        "mpl_toolkits.mplot3d",
    ),
    "pycosat": ("pycosat",),
}
_NEEDS = {"zebra_puzzles": "pycosat"}


def gym_rows(
    name: str,
    *,
    size: int,
    seed: int,
    options: Mapping[str, Json],
    setting: str,
    without: Set[str] = frozenset(),
) -> Iterator[RawRow]:
    """Yield the rows of a data set; they depend on the arguments alone.

    Args:
        name: Name of the data set.
        size: Number of rows.
        seed: Seed of the generator.
        options: Further settings of the data set.
        setting: Name of the settings, for errors.
        without: Questions that are passed over; others come in their place.

    Raises:
        ConfigError: there is no such data set, it refuses its options, or hardly any of its
            questions is left.
    """
    most = size * _TRIES if without else size
    sets = (  # all of one size, which some generators draw their problems by
        _dataset(name, size=size, seed=seed + first, options=options, setting=setting)
        for first in range(0, most, size)
    )
    extra = {OPTIONS_KEY: dict(options)} if options else {}
    found = 0
    for number, entry in enumerate(drawn[place] for drawn in sets for place in range(size)):
        if entry["question"] in without:
            continue
        found += 1
        try:
            kept = plain(entry, "entry")
        except BadRowError as error:
            yield RawRow(number, None, str(error))
        else:
            values = {
                "prompt": kept["question"],
                "ground_truth": kept["answer"],
                "extra_info": {NAME_KEY: name, ENTRY_KEY: kept, **extra},
            }
            yield RawRow(number, values)
        if found == size:
            return
    raise ConfigError(
        f"{setting}: {size} problems of {name} that are not among those to train on: {found} in "
        f"{most}; train on fewer (size), or widen its options"
    )


def verifier(name: str, options: Mapping[str, Json]) -> Verifier:
    """Return a data set's scoring of an answer to one of its entries.

    Raises:
        ConfigError: there is no such data set.
    """
    dataset = _dataset(name, size=1, seed=0, options=options, setting=NAME_KEY)

    def score(answer: str, entry: dict[str, Json]) -> float:
        if name in _COMPARES_TUPLES:  # JSON made lists of tuples in the entry
            metadata = entry["metadata"]
            entry = {**entry, "metadata": {**metadata, "output": _tuples(metadata["output"])}}
        return float(dataset.score_answer(answer, entry))

    return score


def _tuples(value: Json) -> Json:
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value


def _dataset(name: str, *, size: int, seed: int, options: Mapping[str, Json], setting: str) -> Any:  # noqa: ANN401
    library = _library(setting)
    known = sorted(set(importlib.import_module("reasoning_gym.factory").DATASETS) - {"composite"})
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{setting}.reasoning_gym = {name!r} is no data set of reasoning-gym; "
            f"did you mean {close[0]}?"
        )
    needed = _NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        raise ConfigError(
            f"{setting}.reasoning_gym = {name!r} needs {needed}; pip install {needed}"
        )
    for key in ("size", "seed"):
        if key in options:
            raise ConfigError(f"{setting}.options.{key}: set {setting}.{key} instead")
    try:
        return library.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{setting}.options of {name}: {str(error) or 'refused'}") from error


def _library(setting: str) -> Any:  # noqa: ANN401
    try:
        with _optional_left_out():
            library = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"{setting}: reasoning-gym cannot be imported ({error}); pip install 'slipstream[data]'"
        ) from error
    # Some verifiers call eval() on a model's text; they need no more than literals.
    for package, modules in _EVALUATE_ANSWERS.items():
        for module in modules:
            where = importlib.import_module(f"reasoning_gym.{package}.{module}")
            where.__dict__["eval"] = ast.literal_eval
    return library


@contextmanager
def _optional_left_out() -> Iterator[None]:
    """Let reasoning-gym be imported without packages that nearly nothing in it needs.

    cellpylib 2.4.0 imports matplotlib for pictures that no data set draws; pycosat has to be
    compiled. Remove when they are imported where they are used.
    """
    added: list[str] = []
    if "reasoning_gym" not in sys.modules:
        for package, names in _OPTIONAL.items():
            if importlib.util.find_spec(package) is None:
                added += names
    for name in added:
        module = types.ModuleType(name)
        module.__dict__["Axes3D"] = None
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
