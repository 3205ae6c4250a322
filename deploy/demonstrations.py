"""Demonstrations of a file become trajectories to train on: read, turned into tokens, written."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.broker.config import DataSection
from slipstream.broker.data.demonstrations import (
    Demonstration,
    demonstration_columns,
    demonstration_from_row,
)
from slipstream.broker.data.files import RawRow, read_rows, row_name
from slipstream.broker.data.plain import BadRowError
from slipstream.broker.data.rows import RowRules
from slipstream.generators.rollout import packed
from slipstream.generators.text.codec import BadPromptError, TextCodec
from slipstream.generators.text.images import Encoded
from slipstream.generators.turns.demonstrations import (
    DemonstratedTokens,
    conversation_tokens,
    text_tokens,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.trajectory_file import DEMONSTRATED, RecordedGroup, TrajectoryFileWriter
from slipstream.wire.messages.broker import DeliveredGroup, DeliveredTrajectory
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import (
    Prompt,
    TrajectoryHeader,
    Transcript,
    VersionRun,
    transcript_of,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection

_log = logging.getLogger(__name__)
OPTION = "--demonstrations"
_NAMED_ROWS = 3  # rows left out that are named
_PROGRESS_S = 5.0


@dataclass(slots=True)
class Counts:
    """Numbers of a file of demonstrations."""

    rows: int = 0  # rows that can be trained
    tokens: int = 0
    own_tokens: int = 0  # tokens of the policy's own turns
    longest: int = 0  # tokens of a row
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (row, why)

    def add(self, tokens: DemonstratedTokens) -> None:
        """Count a row."""
        self.rows += 1
        self.tokens += len(tokens.token_ids)
        self.own_tokens += sum(turn.num_tokens for turn in tokens.turns)
        self.longest = max(self.longest, len(tokens.token_ids))

    def steps(self, run: RunSection) -> int:
        """Return the learner steps of a run: run.steps, or fewer in which run.epochs are over."""
        in_epochs = math.ceil(run.epochs * self.rows / run.groups_per_step)
        return min(run.steps, in_epochs) if run.epochs else run.steps

    def lines(self, run: RunSection) -> Iterator[str]:
        """Yield what would be trained, for a person to read."""
        yield (
            f"{self.rows:,} demonstrations, {len(self.left_out):,} rows left out; "
            f"{self.tokens:,} tokens, {self.own_tokens:,} of them to train; "
            f"the longest has {self.longest:,}"
        )
        for row, reason in self.left_out[:_NAMED_ROWS]:
            yield f"  left out: {row}: {reason}"
        steps, per_epoch = self.steps(run), self.rows / run.groups_per_step
        yield (
            f"{steps:,} steps of {run.groups_per_step:,} (run.groups_per_step): "
            f"{per_epoch:.4g} steps an epoch, {steps / per_epoch:.4g} epochs"
        )


@dataclass(frozen=True, slots=True)
class DemonstrationReader:
    """Turns the rows of a file into tokens, by the run's settings."""

    codec: TextCodec
    data: DataSection
    longest: int  # most tokens of a row

    def tokens(self, file: Path, counts: Counts) -> Iterator[DemonstratedTokens]:
        """Yield the tokens of each row of a file, and count.

        Raises:
            ConfigError: the file cannot be read, a row is bad and data.on_bad_row is error, or no
                row is good.
        """
        rules = RowRules(
            data_source="",
            prompt_column=self.data.prompt_column,
            ground_truth_column=self.data.ground_truth_column,
            as_chat=self.data.as_chat,
            system_prompt=self.data.system_prompt,
        )
        for raw in read_rows(file, OPTION, demonstration_columns(rules)):
            try:
                found = self._tokens(raw, rules, is_columnar=file.suffix.lower() == ".parquet")
            except BadRowError as error:
                row, why = row_name(file, raw.number), str(error)
                if self.data.on_bad_row == "error":
                    raise ConfigError(f"{OPTION}: {row}: {why} (data.on_bad_row)") from error
                counts.left_out.append((row, why))
                continue
            counts.add(found)
            yield found
        if not counts.rows:
            why = ": ".join(counts.left_out[0]) if counts.left_out else "it has no rows"
            raise ConfigError(f"{OPTION} {file} holds no demonstration: {why}")

    def _tokens(self, raw: RawRow, rules: RowRules, *, is_columnar: bool) -> DemonstratedTokens:
        if raw.values is None:
            raise BadRowError(raw.problem)
        found = demonstration_from_row(raw.values, rules, is_columnar=is_columnar)
        try:
            tokens = self._of(found)
        except BadPromptError as error:
            raise BadRowError(error.why) from error
        except ValueError as error:
            raise BadRowError(str(error)) from error
        if len(tokens.token_ids) > self.longest:
            raise BadRowError(
                f"{len(tokens.token_ids):,} tokens, one of this run has {self.longest:,} at most "
                "(environment.max_tokens, or sampling.max_prompt_tokens and max_response_tokens)"
            )
        return tokens

    def _of(self, found: Demonstration) -> DemonstratedTokens:
        if not found.messages:
            return text_tokens(self.codec, found.prompt, found.reply)
        return conversation_tokens(
            self.codec,
            found.messages,
            found.tools,
            num_given=found.num_given,
            variables=found.variables,
        )


def write_demonstrations(reader: DemonstrationReader, file: Path, out: Path | None) -> Counts:
    """Write the rows of a file as trajectories, each a group of its own; None only counts.

    Raises:
        ConfigError: as ``DemonstrationReader.tokens``, or the file cannot be written.
    """
    counts, said_s = Counts(), time.monotonic()
    writer = None if out is None else TrajectoryFileWriter(out)
    try:
        for number, tokens in enumerate(reader.tokens(file, counts)):
            if writer is not None:
                writer.append([demonstrated_group(tokens, number)])
            if time.monotonic() - said_s > _PROGRESS_S:
                said_s = time.monotonic()
                _log.info("%d demonstrations of %s read", counts.rows, file)
    finally:
        if writer is not None:
            writer.close()
    return counts


def demonstrated_group(tokens: DemonstratedTokens, number: int) -> RecordedGroup:
    """Return a demonstration as a group of one trajectory with reward 1, chosen with certainty."""
    count, first = len(tokens.token_ids), tokens.turns[0].first_token
    header = TrajectoryHeader(
        group_id=number,
        sibling=0,
        lease_id=0,
        num_prompt_tokens=first,
        num_tokens=count,
        version_runs=(VersionRun(first, PolicyVersion(0, 0)),),
        temperature=1.0,
        finish_reason="stop",
        turns=tokens.turns if len(tokens.turns) > 1 else (),
        branches=tokens.branches,
    )
    mask = bytearray(count)
    for turn in tokens.turns:
        mask[turn.first_token : turn.end] = b"\1" * turn.num_tokens
    payload = packed(Encoded(tokens.token_ids), bytes(mask), [0.0] * count, kept=None, experts=None)
    return RecordedGroup(
        step=DEMONSTRATED,
        group=DeliveredGroup(
            group_id=number, trajectories=(DeliveredTrajectory(header=header, reward=1.0),)
        ),
        payloads=(encode(payload),),
        transcripts=(encode(_transcript(tokens, header, number)),),
    )


def _transcript(tokens: DemonstratedTokens, header: TrajectoryHeader, number: int) -> Transcript:
    given, *replies = tokens.texts
    prompt = Prompt(prompt=given, data_source="demonstrations", row=number)
    return transcript_of(header, prompt, "".join(replies), tuple(replies) if header.turns else ())
