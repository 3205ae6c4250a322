"""What the learner computes of a few fixed sequences, for engines to compare with.

Every rank of every replica runs the same forward pass, without gradients and random numbers, so
that the result is on all of them and the run goes on as if there had been none.

Shapes: S sequences of L tokens, of which the first half is context without a logprob.
"""

import math

import numpy as np
import torch

from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.batches.probe_sequences import probe_sequences
from slipstream.learner.model.device import device
from slipstream.learner.training.policy import Policy
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.messages.probe import ProbeLogprobs


class Probe:
    """The probe of one policy. Every rank has one."""

    def __init__(self, policy: Policy, settings: WeightBusSection, *, run_id: str) -> None:
        """Choose the sequences of a run; ``run_id`` is the same on every rank."""
        hf = policy.model.hf_config
        length = min(settings.probe_tokens, hf.max_position_embeddings - 1)  # and a token chosen
        self._policy = policy
        self._every = settings.probe_every
        self._num_publishes = 0
        self._num_context = length // 2
        self._sequences = probe_sequences(
            f"slipstream probe {run_id}",
            vocab_size=hf.vocab_size,
            count=settings.probe_sequences,
            length=length,
        )
        mask = np.arange(length) >= self._num_context
        self._batch = pack(
            [
                TrainTrajectory(
                    token_ids=np.array(one, np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.zeros(length, np.float32),
                    temperature=1.0,
                )
                for one in self._sequences
            ],
            device(),
        )

    @property
    def is_due(self) -> bool:
        """True if the next version is published with a probe."""
        return self._every > 0 and self._num_publishes % self._every == 0

    @torch.no_grad()
    def logprobs(self) -> ProbeLogprobs | None:
        """Return the logprobs under the weights held now, on every rank; None unless one is due.

        None also where one is not finite: the engine's would be none either.
        """
        is_due, self._num_publishes = self.is_due, self._num_publishes + 1
        if not is_due:
            return None
        self._batch.chosen_before.clear()
        (outputs,) = self._policy.proximal([self._batch])
        rows = outputs.logprobs.float().view(len(self._sequences), -1)[:, self._num_context :]
        logprobs = tuple(tuple(row) for row in rows.tolist())
        if not all(math.isfinite(one) for row in logprobs for one in row):
            return None
        return ProbeLogprobs(
            sequences=self._sequences, logprobs=logprobs, num_context=self._num_context
        )
