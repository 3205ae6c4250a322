"""Prompts of a run: the sources that its settings name, read and mixed."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from slipstream.broker.config import DataSection
from slipstream.broker.data.files import RawRow, read_rows, row_name
from slipstream.broker.data.gym import gym_rows
from slipstream.broker.data.image_places import no_image
from slipstream.broker.data.images import RowImages
from slipstream.broker.data.mixture import PromptSource, checked_weights
from slipstream.broker.data.plain import BadRowError
from slipstream.broker.data.rows import TRUTH_COLUMN, RowRules, prompt_from_row
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.trajectory import Prompt
from slipstream.wire.settings.sections import EvalSection, RunSection, SourceTable, local_file

_log = logging.getLogger(__name__)
DEFAULT_SOURCE = "default"
HELD_OUT = "held_out"
_LOGGED_ROWS = 3
_TELLS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """One file or generated data set that the settings name."""

    name: str  # data_source of rows that name none
    setting: str  # data.file, data.sources.NAME, eval.file or eval.sets.NAME
    table: SourceTable
    is_held_out: bool = False

    @property
    def origin(self) -> str:
        """File or generator of its rows."""
        return self.table.file or f"reasoning-gym {self.table.reasoning_gym}"


@dataclass(slots=True)
class LoadedSource:
    """The prompts of one source, and the rows that are none."""

    prompts: list[Prompt] = field(default_factory=list)
    bad_rows: list[tuple[str, str]] = field(default_factory=list)  # (row, why)
    columns: dict[str, None] = field(default_factory=dict)  # columns of any row, in order


def local_data(data: DataSection, run: RunSection) -> DataSection:
    """Return [data] with the paths of local copies for URLs, which are fetched.

    Raises:
        ConfigError: one cannot be fetched.
    """
    file = local_file(run, data.file, "data.file")
    sources = _local(data.sources, run, "data.sources")
    return msgspec.structs.replace(data, file=file, sources=sources)


def local_eval(evaluation: EvalSection, run: RunSection) -> EvalSection:
    """Return [eval] with the paths of local copies for URLs, which are fetched.

    Raises:
        ConfigError: one cannot be fetched.
    """
    file = local_file(run, evaluation.file, "eval.file")
    sets = _local(evaluation.sets, run, "eval.sets")
    return msgspec.structs.replace(evaluation, file=file, sets=sets)


def _local(tables: dict[str, SourceTable], run: RunSection, setting: str) -> dict[str, SourceTable]:
    files = {
        key: local_file(run, table.file, f"{setting}.{key}.file") for key, table in tables.items()
    }
    return {key: msgspec.structs.replace(tables[key], file=file) for key, file in files.items()}


def load_training_prompts(
    data: DataSection, *, seed: int, images: ImageFolder | None = None
) -> PromptSource:
    """Return the training prompts of a run; their images are kept in a folder, if one is named.

    Raises:
        ConfigError: naming the setting.
    """
    sources = training_sources(data)
    weights = checked_weights({s.name: s.table.weight for s in sources}, "data.sources")
    loaded = [_load_and_log(source, data, images) for source in sources]
    return PromptSource(
        [source.prompts for source in loaded],
        seed=seed,
        weights=weights,
        shuffle=data.shuffle,
        num_skipped=sum(len(source.bad_rows) for source in loaded),
    )


def load_eval_problems(
    eval_section: EvalSection, data: DataSection, images: ImageFolder | None = None
) -> list[Prompt]:
    """Return the held-out problems of a run, in the order of its sets; none is no error.

    Raises:
        ConfigError: naming the setting.
    """
    return [
        prompt
        for source in eval_sources(eval_section)
        for prompt in _load_and_log(source, data, images).prompts
    ]


def training_sources(data: DataSection) -> list[Source]:
    """Return the sources of [data]; there must be one."""
    sources = _sources(data.file, data.sources, "data.file", "data.sources", DEFAULT_SOURCE)
    if not sources:
        raise ConfigError("neither data.file nor data.sources is set")
    return sources


def eval_sources(evaluation: EvalSection) -> list[Source]:
    """Return the sources of [eval], which may be none."""
    named = _sources(evaluation.file, evaluation.sets, "eval.file", "eval.sets", HELD_OUT)
    sources = [replace(source, is_held_out=True) for source in named]
    for source in sources:
        if source.table.weight:
            raise ConfigError(f"{source.setting}.weight: every held-out problem is asked")
    return sources


def load_source(
    source: Source,
    data: DataSection,
    *,
    keep_going: bool,
    images: ImageFolder | None = None,
    reads_pixels: bool = False,
) -> LoadedSource:
    """Read one source.

    Problems that reasoning-gym generates to be held out are never among those that it generates to
    train on. Files are not compared.

    Args:
        source: File or generated data set.
        data: The section [data].
        keep_going: False if the first bad row is an error.
        images: Images of the run, which keeps them; None keeps none.
        reads_pixels: True if all pixels of images are read, not only their heads.

    Raises:
        ConfigError: naming the setting.
    """
    table, setting = source.table, source.setting
    rules = RowRules(
        data_source=source.name,
        prompt_column="prompt" if table.reasoning_gym else data.prompt_column,
        ground_truth_column=TRUTH_COLUMN if table.reasoning_gym else data.ground_truth_column,
        as_chat=data.as_chat if table.as_chat is None else table.as_chat,
        system_prompt=data.system_prompt if table.system_prompt is None else table.system_prompt,
        image_columns=() if table.reasoning_gym else image_columns(data),
        max_images=data.max_images,
    )
    take = (
        RowImages(Path(table.file).parent, images, reads_pixels=reads_pixels).take
        if table.file
        else no_image
    )
    loaded = LoadedSource()
    columns = loaded.columns
    told_s = time.monotonic()
    for number, raw in enumerate(_raw_rows(source, data, rules)):
        if time.monotonic() - told_s > _TELLS_EVERY_S:
            told_s = time.monotonic()
            _log.info("%s: %s rows read so far", setting, f"{number:,}")
        if table.max_rows and number >= table.max_rows:
            break
        columns.update(dict.fromkeys(raw.values or ()))
        try:
            if raw.values is None:
                raise BadRowError(raw.problem)  # noqa: TRY301 one way out for all bad rows
            loaded.prompts.append(
                prompt_from_row(raw.values, rules, number=raw.number, take_image=take)
            )
        except BadRowError as error:
            row = row_name(Path(table.file), raw.number) if table.file else f"row {raw.number}"
            loaded.bad_rows.append((row, str(error)))
            if not keep_going and rules.prompt_column in columns:
                row, why = loaded.bad_rows[0]
                raise ConfigError(f"{setting}: {row}: {why} (data.on_bad_row)") from error
    needed = {"prompt_column": rules.prompt_column}
    if rules.ground_truth_column != TRUTH_COLUMN:  # else a row needs none
        needed["ground_truth_column"] = rules.ground_truth_column
    for key, column in needed.items():
        if columns and column not in columns:
            raise ConfigError(
                f"data.{key} = {column!r}: {setting} = {table.file} has no such column; it has "
                f"{', '.join(columns)}"
            )
    if loaded.bad_rows and not keep_going:
        row, why = loaded.bad_rows[0]
        raise ConfigError(f"{setting}: {row}: {why} (data.on_bad_row)")
    if not loaded.prompts:
        why = f"; {loaded.bad_rows[0][0]}: {loaded.bad_rows[0][1]}" if loaded.bad_rows else ""
        raise ConfigError(f"{setting} = {source.origin} holds no prompts{why}")
    return loaded


def _load_and_log(source: Source, data: DataSection, images: ImageFolder | None) -> LoadedSource:
    loaded = load_source(source, data, keep_going=data.on_bad_row == "skip", images=images)
    if loaded.bad_rows:
        _log.warning("%s: %d rows skipped", source.setting, len(loaded.bad_rows))
        for row, reason in loaded.bad_rows[:_LOGGED_ROWS]:
            _log.warning("  %s: %s", row, reason)
    return loaded


def image_columns(data: DataSection) -> tuple[str, ...]:
    """Return the columns that images are looked for in; the usual one has two names."""
    if data.image_column == "images":
        return ("images", "image")
    return (data.image_column,) if data.image_column else ()


def _raw_rows(source: Source, data: DataSection, rules: RowRules) -> Iterator[RawRow]:
    table = source.table
    if table.file:
        return read_rows(Path(table.file), source.setting, rules.columns)
    without = _questions(data, table.reasoning_gym) if source.is_held_out else frozenset[str]()
    return _generated(source, without)


def _questions(data: DataSection, name: str) -> frozenset[str]:
    """Return what a data set of reasoning-gym asks in training."""
    sources = training_sources(data) if data.sources else []
    return frozenset(
        row.values["prompt"]
        for source in sources
        if source.table.reasoning_gym == name
        for row in _generated(source, frozenset())
        if row.values is not None
    )


def _generated(source: Source, without: frozenset[str]) -> Iterator[RawRow]:
    table = source.table
    return gym_rows(
        table.reasoning_gym,
        size=min(table.size, table.max_rows or table.size),
        seed=table.seed,
        options=table.options,
        setting=source.setting,
        without=without,
    )


def _sources(
    file: str, tables: dict[str, SourceTable], file_setting: str, setting: str, name: str
) -> list[Source]:
    if file and tables:
        raise ConfigError(
            f"{file_setting} and {setting} exclude each other: {file_setting} is short for one "
            "source"
        )
    if file:
        return [Source(name, file_setting, SourceTable(file=file))]
    for key, table in tables.items():
        if bool(table.file) == bool(table.reasoning_gym):
            raise ConfigError(f"{setting}.{key} needs either file or reasoning_gym")
    return [Source(key, f"{setting}.{key}", table) for key, table in tables.items()]
