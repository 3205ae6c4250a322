"""One order to SGLang's scheduler for all that a received version needs (sglang 0.5.23).

As five requests, pause, load, checksums, label and continue cost more than a small version's load.
Here they are one, carried out by the scheduler between two batches: no answer sees a step of it. It
travels in ``UpdateWeightFromDiskReqInput.manifest``, which SGLang leaves to its user, and is
answered in ``message``. Remove when SGLang has such a request.
"""

import json
import sys
import time
from types import ModuleType
from typing import Any, Literal, Self

import msgspec

from slipstream.generators.sglang.replacing import replace
from slipstream.weightbus.version.engine_checksums import digest_of
from slipstream.wire.errors import EngineError
from slipstream.wire.files.families.registry import checksum_name


class AdoptionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is to adopt, besides the folder."""

    version: str  # label
    pause: Literal["retract", "in_place"]
    digest: str  # of the checksums that it must have then; empty compares nothing
    num_ranks: int  # that its tensors are split over


class AdoptionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How that went; the engine generates again unless checksums differ."""

    version: str
    phase_seconds: dict[str, float]
    differing: dict[str, str] = {}  # checksums of all tensors, if their digest is another one

    @classmethod
    def read(cls, message: str) -> Self:
        """Return the first answer in a message: groups of ranks answer one after the other.

        Raises:
            EngineError: there is none.
        """
        try:
            found, _ = json.JSONDecoder().raw_decode(message)
            return msgspec.convert(found, cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise EngineError(f"SGLang: unexpected answer {message[:200]!r}") from error


def adopt_in_scheduler(module: ModuleType) -> None:
    """Carry out an ``AdoptionOrder`` where a scheduler updates weights from disk."""
    manager = module.SchedulerWeightUpdaterManager
    messages = sys.modules[module.CheckWeightsReqInput.__module__]
    load = manager.update_weights_from_disk

    def update_weights_from_disk(self: Any, recv_req: Any) -> Any:  # noqa: ANN401
        if recv_req.manifest is None:
            return load(self, recv_req)
        order = msgspec.convert(recv_req.manifest, AdoptionOrder)
        seconds: dict[str, float] = {}
        since_s = time.monotonic()

        def lap(phase: str) -> None:
            nonlocal since_s
            now_s = time.monotonic()
            seconds[phase], since_s = now_s - since_s, now_s

        self.scheduler.pause_generation(messages.PauseGenerationReqInput(mode=order.pause))
        lap("pause")
        output = load(self, recv_req)
        lap("load")
        differing: dict[str, str] = {}
        if output.success and order.digest:
            checked = self.check_weights(messages.CheckWeightsReqInput(action="checksum"))
            output.success, output.message = checked.success, checked.message
            found = checksums_of(checked.payload or [])
            ranks = len(checked.payload or [])
            if output.success and ranks != order.num_ranks:
                output.success = False
                output.message = f"{ranks} ranks answered, {order.num_ranks} were expected"
            differing = found if digest_of(found) != order.digest else {}
        lap("verify")
        if not output.success:
            return output
        if not differing:
            self.scheduler.record_weight_version_change(new_version=order.version)
            resume = messages.ContinueGenerationReqInput(torch_empty_cache=False)
            self.scheduler.continue_generation(resume)
        lap("commit")
        answer = AdoptionAnswer(version=order.version, phase_seconds=seconds, differing=differing)
        output.message = msgspec.json.encode(answer).decode()
        return output

    replace(manager, "update_weights_from_disk", update_weights_from_disk)


def checksums_of(ranks: Any) -> dict[str, str]:  # noqa: ANN401 SGLang's
    """Return the checksum of every tensor on every rank, by ``checksum_name``."""
    return {
        checksum_name(name, one.parallelism_info[0].tp_rank): checksum
        for one in ranks
        for name, checksum in one.checksums.items()
    }


def adopt_in_tokenizer(module: ModuleType) -> None:
    """Pass an ``AdoptionOrder`` on at once: SGLang would wait for answers in flight to end."""
    manager = module.TokenizerManager
    update = manager.update_weights_from_disk

    async def update_weights_from_disk(self: Any, obj: Any, request: Any = None) -> Any:  # noqa: ANN401
        if obj.manifest is None:
            return await update(self, obj, request)
        self.auto_create_handle_loop()
        success, message, num_paused = await self._wait_for_model_update_from_disk(obj)
        if success and not AdoptionAnswer.read(message).differing:
            self._update_weight_version_if_provided(obj.manifest["version"])
            async with self.is_pause_cond:  # by a request of its own, before
                self.is_pause = False
                self.is_pause_cond.notify_all()
        return success, message, num_paused

    replace(manager, "update_weights_from_disk", update_weights_from_disk)
