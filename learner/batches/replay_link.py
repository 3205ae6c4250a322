"""Batches from a trajectory file, in place of a broker: training alone, without generators."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from pathlib import Path

import msgspec

from slipstream.learner.batches.orders import Rejection, StepPlan, plan_batch
from slipstream.learner.config import LearnerSettings
from slipstream.wire.errors import ConfigError, ImageError
from slipstream.wire.files.checkpoints import (
    CheckpointInfo,
    read_checkpoint_info,
    readable_checkpoints,
)
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.files.row_order import row_order
from slipstream.wire.files.run_folder import IMAGES
from slipstream.wire.files.trajectory_file import (
    DEMONSTRATED,
    NOT_TRAINED,
    NumberedGroups,
    RecordedGroup,
    read_groups,
    read_steps,
)
from slipstream.wire.messages.broker import (
    BatchDelivered,
    BatchNotReady,
    RunComplete,
    StepCommitted,
)
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.trajectory import TrajectoryKey, VersionRun
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.flops import SequenceCost
from slipstream.wire.models.hf_config import load_hf_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The groups of one learner step."""

    step: int
    groups: tuple[RecordedGroup, ...]


def recorded_batches(
    groups: Iterator[RecordedGroup], *, groups_per_step: int
) -> Iterator[RecordedBatch]:
    """Yield batches in order: as trained, and untrained groups ``groups_per_step`` at a time.

    A step that was recorded twice (its learner died and another trained it again) comes once.
    Trajectories at the end that do not fill a batch are left out.
    """
    waiting: list[RecordedGroup] = []
    next_step = 0
    for group in groups:
        complete = bool(waiting) and (
            group.step != waiting[0].step
            or (group.step == NOT_TRAINED and len(waiting) == groups_per_step)
        )
        if complete:
            batch = _batch(waiting, next_step, groups_per_step)
            if batch is not None:
                yield batch
                next_step = batch.step + 1
            waiting = []
        waiting.append(group)
    if waiting:
        last = _batch(waiting, next_step, groups_per_step)
        if last is not None:
            yield last


def _batch(
    groups: list[RecordedGroup], next_step: int, groups_per_step: int
) -> RecordedBatch | None:
    step = groups[0].step
    if step == NOT_TRAINED:
        full = len(groups) == groups_per_step
        return RecordedBatch(next_step, tuple(groups)) if full else None
    return RecordedBatch(step, tuple(groups)) if step >= next_step else None


def refuse_partial_steps(steps: Iterable[int], *, path: Path, until: int) -> None:
    """Check that a recording holds whole steps, one after the other; the last may be smaller.

    ``steps`` are the steps of the groups in the file, in order. Steps from ``until`` on are not
    trained, so they are not checked.

    Raises:
        ConfigError: a step is missing or was not recorded whole; the message names it.
    """
    first: tuple[int, int] | None = None  # step, number of its groups
    smaller: tuple[int, int] | None = None
    next_step = 0
    for step, groups in groupby(steps):
        if step == NOT_TRAINED or (first is not None and step < next_step):
            continue  # not trained, or trained again
        if smaller is not None:
            raise _not_whole(path, smaller, first)
        if step >= until:
            return
        if first is not None and step != next_step:
            raise ConfigError(f"{path} holds step {step} but not step {next_step}")
        present = (step, sum(1 for _ in groups))
        first = first or present
        if present[1] > first[1]:
            raise _not_whole(path, present, first)
        if present[1] < first[1]:
            smaller = present
        next_step = step + 1


def _not_whole(path: Path, bad: tuple[int, int], first: tuple[int, int] | None) -> ConfigError:
    step, count = bad
    than = f", step {first[0]} has {first[1]}" if first is not None else ""
    return ConfigError(
        f"step {step} of {path} has {count} groups{than}: it was not recorded whole; "
        f"run.steps={step} ends before it"
    )


class Recording:
    """Batches of a file by their step, which rises from call to call."""

    def __init__(self, path: Path, settings: LearnerSettings) -> None:
        """Open the file.

        Raises:
            ConfigError: the file cannot be read, or a step was not recorded whole.
        """
        refuse_partial_steps(read_steps(path), path=path, until=settings.run.steps)
        self._batches = recorded_batches(
            read_groups(path), groups_per_step=settings.run.groups_per_step
        )
        self._present: RecordedBatch | None = None

    def at(self, step: int) -> RecordedBatch | None:
        """Return the batch of a step, or the first after it; None where the file ends."""
        while self._present is None or self._present.step < step:
            batch = next(self._batches, None)
            if batch is None:
                return None
            self._present = batch
        return self._present


class Demonstrations:
    """Batches of demonstrations by their step: epoch after epoch, in an order of run.seed.

    They count as chosen by the policy of the step that trains them.
    """

    def __init__(self, path: Path, settings: LearnerSettings) -> None:
        """Find the demonstrations in a file.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._groups = NumberedGroups(path)
        self._seed, self._shuffles = settings.run.seed, settings.shuffles
        self._per_step = settings.run.groups_per_step
        self._order = lru_cache(maxsize=2)(self._order_of)
        self.at = lru_cache(maxsize=1)(self._at)

    def _at(self, step: int) -> RecordedBatch:
        """Return the batch of a step."""
        first = step * self._per_step
        positions = range(first, first + self._per_step)
        return RecordedBatch(step, tuple(self._group(position, step) for position in positions))

    def _group(self, position: int, step: int) -> RecordedGroup:
        epoch, place = divmod(position, len(self._groups))
        recorded = self._groups[self._order(epoch)[place]]
        trajectory = recorded.group.trajectories[0]
        header = msgspec.structs.replace(
            trajectory.header,
            group_id=position,
            version_runs=(VersionRun(trajectory.header.num_prompt_tokens, PolicyVersion(0, step)),),
        )
        trajectory = msgspec.structs.replace(trajectory, header=header)
        group = msgspec.structs.replace(
            recorded.group, group_id=position, trajectories=(trajectory,)
        )
        return msgspec.structs.replace(recorded, group=group)

    def _order_of(self, epoch: int) -> Sequence[int]:
        return row_order(f"{self._seed}/{epoch}", len(self._groups), shuffles=self._shuffles)


class ReplayLink:
    """One rank's view of a trajectory file. Rank 0 leads; all ranks read the same file.

    Figures go to RUN/replay/metrics.jsonl, weights nowhere. ``run.steps`` bounds the number of
    steps.
    """

    publishes = False

    def __init__(self, path: Path, settings: LearnerSettings) -> None:
        """Open the file.

        Raises:
            ConfigError: the file cannot be read, or a step was not recorded whole.
        """
        is_demonstrated = next(read_steps(path), NOT_TRAINED) == DEMONSTRATED
        self._file: Demonstrations | Recording = (
            Demonstrations(path, settings) if is_demonstrated else Recording(path, settings)
        )
        self._path = path
        self._settings = settings
        self._cost = SequenceCost.of(load_hf_config(settings.model), settings.adapters)
        self._metrics = settings.run.folder / "replay" / "metrics.jsonl"

    run_id = ""  # there is no broker

    def take_over(
        self,
        step: int,
        checkpoint: str,  # noqa: ARG002 there is no broker
        resumed: CheckpointInfo | None,  # noqa: ARG002 the same
    ) -> PolicyVersion:
        """Start at ``step``, in an epoch above that of every checkpoint there is."""
        known = list(readable_checkpoints(self._settings.run.checkpoints).values())
        if self._settings.resume_from is not None:
            known.append(read_checkpoint_info(self._settings.resume_from))
        epoch = max((info.version.epoch for info in known), default=0)
        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        return PolicyVersion(epoch + 1, step)

    def next_order(
        self,
        version: PolicyVersion,
        *,
        max_wait_s: float,  # noqa: ARG002 a file is there at once
    ) -> StepPlan | BatchNotReady | RunComplete:
        """Return the batch recorded for this step; the run is complete where the file ends.

        Raises:
            ConfigError: the file has a gap, or a batch too small to split.
        """
        if version.step >= self._settings.run.steps:
            return RunComplete()
        batch = self._file.at(version.step)
        if batch is None:
            _log.info("%s ends after step %d", self._path, version.step)
            return RunComplete()
        if batch.step != version.step:
            raise ConfigError(f"{self._path} holds step {batch.step} but not step {version.step}")
        delivered = BatchDelivered(step=batch.step, groups=tuple(g.group for g in batch.groups))
        return plan_batch(delivered, self._settings, cost=self._cost)

    def fetch(self, step: int, keys: Sequence[TrajectoryKey]) -> list[Frame]:
        """Return payloads of the batch recorded for this step."""
        batch = self._file.at(step)
        found: dict[TrajectoryKey, bytes] = {}
        if batch is not None and batch.step == step:
            for recorded in batch.groups:
                group = recorded.group
                for trajectory, payload in zip(group.trajectories, recorded.payloads, strict=True):
                    found[group.group_id, trajectory.header.sibling] = payload
        missing = [key for key in keys if key not in found]
        if missing:
            raise ConfigError(f"{self._path} holds no trajectory {missing[0]} at step {step}")
        return [found[key] for key in keys]

    def fetch_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the images next to the file, or in the folder of the run that it is in."""
        found: dict[str, bytes] = {}
        places = [folder / IMAGES for folder in self._path.resolve().parents[:2]]
        for digest, place in product(digests, places):
            if digest in found:
                continue
            try:
                found[digest] = ImageFolder(place).read(digest)
            except ImageError as error:
                _log.debug("%s", error)
        if missing := len(digests) - len(found):
            _log.warning(
                "%d of %d images are not in %s: copy images/ of the run there",
                missing,
                len(digests),
                " or ".join(str(folder) for folder in places),
            )
        return found

    def begin_prefetch(self, step: int) -> None:
        """Do nothing: a file is there already."""

    def reject_batch(self, version: PolicyVersion, rejection: Rejection) -> None:
        """Refuse: a recording has one batch for each step.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"step {version.step} of {self._path} cannot be trained ({rejection.reason}): "
            f"{rejection.detail}; run.steps={version.step} ends before it"
        )

    def commit(
        self, version: PolicyVersion, metrics: dict[str, float], num_tokens: int
    ) -> StepCommitted:
        """Append the figures of a step to a file."""
        row = {"step": version.step, "tokens": num_tokens, **metrics}
        with self._metrics.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        return StepCommitted(evaluations=(), last_step=self._settings.run.steps)

    def open_weights(
        self, paths: Sequence[str], layout: WeightManifest, *, part_keys: Sequence[str] = ()
    ) -> None:
        """Do nothing: there are no engines."""

    def reserve(self) -> int:
        """Return the first slot: there is no reader."""
        return 0

    def publish(self, version: PolicyVersion, slot: int, probe: ProbeLogprobs | None) -> None:
        """Do nothing: there are no engines."""

    def ledger_snapshot(
        self,
        version: PolicyVersion,  # noqa: ARG002 no version has a ledger
    ) -> bytes:
        """Return nothing: there is no broker."""
        return b""

    def leave(self, *, is_stopped: bool = False) -> None:
        """Do nothing: no role waits."""

    def seal(self, version: PolicyVersion, *, step: int, oldest_kept: int) -> None:
        """Do nothing: a file keeps everything."""

    def end(self) -> None:
        """Do nothing: there is no relay."""

    def close(self) -> None:
        """Do nothing: the file closes with its iterator."""
