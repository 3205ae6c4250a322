"""One order to SGLang's scheduler for several steps of a publish (sglang 0.5.23).

Pause, load, checksums, label and continue cost more as five requests than the load of a small
version. Here they are one order, carried out by the scheduler between two batches: no answer sees a
step of it. A collective takes two orders, one before its buckets and one after. An order travels in
``UpdateWeightFromDiskReqInput.manifest``, which SGLang leaves to its user; the answer comes in
``message``. Remove when SGLang has such a request.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, TypeAlias

import msgspec

from slipstream.generators.sglang.replacing import replace
from slipstream.generators.sglang.shadow_loads import (
    Staged,
    check,
    checksums,
    copy_over,
    forget,
    stage,
)
from slipstream.weightbus.version.engine_checksums import has_digest
from slipstream.weightbus.version.mapped_file import watched
from slipstream.wire.errors import EngineError, PublishError
from slipstream.wire.models.families.registry import checksum_name

RECEIVED_VARIABLE = "SLIPSTREAM_RECEIVED"
"""Folder with the versions that this host received, if orders come from another host."""

Step: TypeAlias = Literal[
    "stage", "compare", "pause", "begin", "load", "copy", "end", "check", "label", "resume"
]
ALL_STEPS: tuple[Step, ...] = ("pause", "load", "check", "label", "resume")
STAGE_STEPS: tuple[Step, ...] = ("stage",)
STAGED_STEPS: tuple[Step, ...] = ("compare", "pause", "copy", "label", "resume")
"""Steps to a version that is in the shadow (weight_shadow.py)."""
_PHASES: dict[Step, str] = {
    "compare": "verify",
    "copy": "load",
    "pause": "pause",
    "begin": "pause",
    "load": "load",
    "end": "verify",
    "check": "verify",
    "label": "commit",
    "resume": "commit",
}


class AdoptionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Steps for a scheduler between two batches; the folder to load comes besides."""

    steps: tuple[Step, ...]  # done in order until one fails
    version: str  # label
    pause: Literal["retract", "in_place"]
    digest: str  # expected digest of the checksums; empty checks nothing
    num_ranks: int  # ranks that share its tensors


class AdoptionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order; nothing was labelled or resumed if checksums differ."""

    steps: tuple[Step, ...]
    version: str
    phase_seconds: dict[str, float]  # keys are from PUBLISH_PHASES
    differing: dict[str, str] = {}  # checksums of all tensors, if their digest is not the expected
    staged: Staged | None = None  # state of a version in the shadow, after "stage"

    @classmethod
    def read(cls, message: str) -> Self:
        """Return the first answer in a message: groups of ranks answer one after the other.

        Raises:
            EngineError: the message has no answer.
        """
        try:
            found, _ = json.JSONDecoder().raw_decode(message)
            return msgspec.convert(found, cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise EngineError(f"SGLang: unexpected answer {message[:200]!r}") from error


def load_whole_versions(module: ModuleType) -> None:
    """Load a folder that holds a version before and after: the learner may have overwritten it."""
    manager = module.SchedulerWeightUpdaterManager
    messages = sys.modules[module.CheckWeightsReqInput.__module__]
    load = manager.update_weights_from_disk

    def update_weights_from_disk(self: Any, recv_req: Any) -> Any:  # noqa: ANN401
        if recv_req.manifest is None:
            return load(self, recv_req)
        version = msgspec.convert(recv_req.manifest, AdoptionOrder).version
        with watched(Path(recv_req.model_path), version) as difference:
            why = difference()
            output = load(self, recv_req) if not why else None
            if output is None or (output.success and (why := difference())):
                return messages.UpdateWeightFromDiskReqOutput(success=False, message=why)
            return output

    replace(manager, "update_weights_from_disk", update_weights_from_disk)


class _SchedulerSteps:
    """Steps of an order as calls of SGLang's manager of updates; each returns its answer, or None.

    ``load`` is the manager's update from disk.
    """

    def __init__(self, messages: ModuleType, load: Callable[[Any, Any], Any]) -> None:
        self._messages = messages
        self._load = load

    def answer(self, message: str, *, success: bool = True) -> Any:  # noqa: ANN401
        return self._messages.UpdateWeightFromDiskReqOutput(success=success, message=message)

    def take(self, step: Step, manager: Any, request: Any, order: AdoptionOrder) -> Any:  # noqa: ANN401
        """Take a step."""
        messages = self._messages
        match step:
            case "pause":
                pause = messages.PauseGenerationReqInput(mode=order.pause)
                manager.scheduler.pause_generation(pause)
            case "begin":
                return manager.begin_weight_update(messages.BeginWeightUpdateReqInput())
            case "load":
                return self._load(manager, request)
            case "copy":
                return self._copy(manager, request, order)
            case "end":
                return manager.end_weight_update(messages.EndWeightUpdateReqInput())
            case "compare":
                return self._compare(manager, order)
            case "check" if order.digest:
                return manager.check_weights(messages.CheckWeightsReqInput(action="checksum"))
            case "label":
                manager.scheduler.record_weight_version_change(new_version=order.version)
            case "resume":
                resume = messages.ContinueGenerationReqInput(torch_empty_cache=False)
                manager.scheduler.continue_generation(resume)
            case _:
                pass
        return None

    def _compare(self, manager: Any, order: AdoptionOrder) -> Any:  # noqa: ANN401
        check(manager, order.version)
        if not order.digest:
            return None
        return checksums(manager, self._messages.CheckWeightsReqInput(action="checksum"))

    def _copy(self, manager: Any, request: Any, order: AdoptionOrder) -> Any:  # noqa: ANN401
        copy_over(manager, order.version)
        success, message = manager.flush_cache_after_weight_update(request, True, "")
        return self.answer(message, success=success)


def adopt_in_scheduler(module: ModuleType) -> None:
    """Carry out an ``AdoptionOrder`` in the scheduler's update from disk."""
    manager = module.SchedulerWeightUpdaterManager
    load = manager.update_weights_from_disk
    steps = _SchedulerSteps(sys.modules[module.CheckWeightsReqInput.__module__], load)
    received = os.environ.get(RECEIVED_VARIABLE, "")  # noqa: TID251 reaches spawned processes

    def update_weights_from_disk(self: Any, recv_req: Any) -> Any:  # noqa: ANN401
        recv_req.model_path = folder_to_load(recv_req.model_path, received)
        if recv_req.manifest is None:
            return load(self, recv_req)
        order = msgspec.convert(recv_req.manifest, AdoptionOrder)
        seconds: dict[str, float] = {}
        differing: dict[str, str] = {}
        state: Staged | None = None
        for step in order.steps:
            began_s = time.monotonic()
            try:
                if step == "stage":  # its phases are those of its thread
                    state, seconds = stage(self, recv_req.model_path, order.version)
                    continue
                output = steps.take(step, self, recv_req, order)
            except PublishError as error:
                return steps.answer(f"{step}: {error}", success=False)
            if output is not None and not output.success:
                return steps.answer(f"{step}: {output.message}", success=False)
            phase = _PHASES[step]
            seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began_s
            if step in {"check", "compare"} and output is not None:
                found = checksums_of(output.payload or [])
                if not has_digest(found, order.digest):
                    differing = found
                    if step == "compare":
                        forget(self)
                    break
        answer = AdoptionAnswer(
            steps=order.steps,
            version=order.version,
            phase_seconds=seconds,
            differing=differing,
            staged=state,
        )
        return steps.answer(msgspec.json.encode(answer).decode())

    replace(manager, "update_weights_from_disk", update_weights_from_disk)


def folder_to_load(named: str, received: str) -> str:
    """Return the folder of a version on this host; one without weights if it is not there, whole.

    Args:
        named: Folder in the order.
        received: Folder of this host's versions, if the order comes from another host; else empty.
    """
    folder = Path(received) / Path(named).name if received else Path(named)
    return str(folder if folder.is_dir() else folder.parent)


def checksums_of(ranks: Any) -> dict[str, str]:  # noqa: ANN401 SGLang's
    """Return the checksum of every tensor on every rank, by ``checksum_name``."""
    return {
        checksum_name(name, rank.parallelism_info[0].tp_rank): checksum
        for rank in ranks
        for name, checksum in rank.checksums.items()
    }


def adopt_in_tokenizer(module: ModuleType) -> None:
    """Pass an ``AdoptionOrder`` on at once: SGLang would wait for answers in flight to end."""
    manager = module.TokenizerManager
    update = manager.update_weights_from_disk

    async def update_weights_from_disk(self: Any, obj: Any, request: Any = None) -> Any:  # noqa: ANN401
        if obj.manifest is None:
            return await update(self, obj, request)
        self.auto_create_handle_loop()
        order = msgspec.convert(obj.manifest, AdoptionOrder)
        if "resume" not in order.steps and order.steps != STAGE_STEPS:
            async with self.is_pause_cond:  # so that updates do not wait for answers in flight
                self.is_pause = True
        success, message, num_paused = await self._wait_for_model_update_from_disk(obj)
        resumed = success and "resume" in order.steps
        if resumed and not AdoptionAnswer.read(message).differing:
            self._update_weight_version_if_provided(order.version)
            async with self.is_pause_cond:
                self.is_pause = False
                self.is_pause_cond.notify_all()
        return success, message, num_paused

    replace(manager, "update_weights_from_disk", update_weights_from_disk)
