"""Batches that decode some answers while they prefill others, with the logprobs of both.

SGLang 0.5.23 mixes them with --enable-mixed-chunk, but not where logprobs are asked for, as they
are for every answer here. Remove when it does.
"""

import logging
import weakref
from types import ModuleType
from typing import Any

from slipstream.generators.sglang.replacing import leave_out, replace

_log = logging.getLogger(__name__)
_WITHOUT_LOGPROBS = "and not (new_batch.return_logprob or running_batch.return_logprob)"
_NONE = 1  # start after an answer's one new token: no logprobs of inputs


class MixedBatches:
    """Mixes batches, and counts the answers in them as being generated."""

    def __init__(self) -> None:
        self._newest: Any = lambda: None  # weak: a batch lives as long as the scheduler needs it

    def plan(self, module: ModuleType) -> None:
        """Let the scheduler mix batches whose logprobs are asked for."""
        leave_out(module.Scheduler, "_get_new_batch_prefill_raw", _WITHOUT_LOGPROBS)

    def mix(self, module: ModuleType) -> None:
        """Ask for no logprobs of inputs of the answers that are decoded.

        SGLang asks for one each, whose token it lacks.
        """
        batch = module.ScheduleBatch
        mix = batch.mix_with_running

        def mix_with_running(self_: Any, running_batch: Any) -> None:  # noqa: ANN401
            num_decoded = running_batch.batch_size()
            mix(self_, running_batch)
            starts = self_.extend_logprob_start_lens
            starts[len(starts) - num_decoded :] = [_NONE] * num_decoded
            self._newest = weakref.ref(self_)
            _log.info("Mixed batch, #decode-req: %d", num_decoded)

        replace(batch, "mix_with_running", mix_with_running)

    def report(self, module: ModuleType) -> None:
        """Report the answers of a mixed batch as running, which SGLang counts nowhere."""
        inquirer = module.SchedulerLoadInquirer
        inquire = inquirer.get_loads

        def get_loads(of: Any) -> Any:  # noqa: ANN401
            snapshot = inquire(of)
            newest = self._newest()
            if newest is not None and not snapshot.num_running_reqs:
                snapshot.num_running_reqs = sum(
                    not (req.finished() or req.is_retracted) for req in newest.reqs
                )
            return snapshot

        replace(inquirer, "get_loads", get_loads)
