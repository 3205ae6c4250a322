"""The learner's logprobs of a few random sequences, for engines to compare with theirs.

The context of the sequences is the same for the whole run, so a prefix cache may hold it from
before; the tokens after it differ between versions, and no engine knows them before it has that
version.

Every rank of every replica runs the same forward pass, without gradients and random numbers: all
ranks have the result, and the run is the same as without a probe.

Shapes: S sequences of L tokens; the first half is context without logprobs.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.batches.probe_sequences import probe_sequences
from slipstream.learner.model.device import device
from slipstream.learner.training.policy import Policy
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.messages.probe import ProbeLogprobs


class Probe:
    """The probe of one policy. Every rank has one."""

    def __init__(self, policy: Policy, settings: WeightBusSection, *, seed: str) -> None:
        """Choose no tokens yet; ``seed`` is the same on every rank, and known to no engine."""
        hf = policy.model.hf_config
        self._policy = policy
        self._every = settings.probe_every
        self._num_publishes = 0
        self._seed = seed
        self._vocab_size = hf.vocab_size
        self._count = settings.probe_sequences
        self._length = min(settings.probe_tokens, hf.max_position_embeddings - 1)  # and one chosen
        self._num_context = self._length // 2

    @property
    def is_due(self) -> bool:
        """True if the next version is published with a probe."""
        return self._every > 0 and self._num_publishes % self._every == 0

    @torch.no_grad()
    def logprobs(self) -> ProbeLogprobs | None:
        """Return the logprobs under the present weights, on every rank; None unless a probe is due.

        Also None if a logprob is not finite: the engine's would not be finite either.
        """
        is_due, self._num_publishes = self.is_due, self._num_publishes + 1
        if not is_due:
            return None
        sequences = self._sequences()
        (outputs,) = self._policy.proximal([self._batch_of(sequences)])
        rows = outputs.logprobs.float().view(len(sequences), -1)[:, self._num_context :]
        logprobs = tuple(tuple(row) for row in rows.tolist())
        if not all(math.isfinite(logprob) for row in logprobs for logprob in row):
            return None
        return ProbeLogprobs(sequences=sequences, logprobs=logprobs, num_context=self._num_context)

    def _sequences(self) -> tuple[tuple[int, ...], ...]:
        """Return the run's context and tokens of this publish."""
        of_run, of_publish = (
            probe_sequences(
                f"slipstream probe {self._seed}{number}",
                vocab_size=self._vocab_size,
                count=self._count,
                length=self._length,
            )
            for number in ("", f" {self._num_publishes}")
        )
        at = self._num_context
        return tuple(
            (*run[:at], *publish[at:]) for run, publish in zip(of_run, of_publish, strict=True)
        )

    def _batch_of(self, sequences: Sequence[Sequence[int]]) -> PackedBatch:
        mask = np.arange(self._length) >= self._num_context
        return pack(
            [
                TrainTrajectory(
                    token_ids=np.array(tokens, np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.zeros(self._length, np.float32),
                    temperature=1.0,
                )
                for tokens in sequences
            ],
            device(),
        )
