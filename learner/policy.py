"""The policy under training and the reference policy. They know tensors, not trajectories.

Shapes: T tokens of B sequences laid end to end, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from algos.diagnostics import Sums
from algos.linear_logprobs import OutputLayer, Reference, TokenLogprobs, linear_logprobs
from learner.collate import PackedBatch
from learner.config import LearnerSection
from learner.critic import Critic
from learner.model import output_weight, packed_forward
from learner.replicas import Replicas
from learner.topology import Topology
from learner.trainable import LossFunction, Trainable


class ReferencePolicy:
    """A frozen model; its log-probabilities are of the same tempered distributions."""

    def __init__(self, model: GPTModel, topology: Topology) -> None:
        """Freeze a model."""
        self._model = model.requires_grad_(False)
        self._topology = topology

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch."""
        return [token_logprobs(batch, *self.said(batch)).logprobs for batch in batches]

    @torch.no_grad()
    def said(self, batch: PackedBatch) -> Reference:
        """Return its hidden states and output layer, from which KL is taken in full."""
        hidden = packed_forward(
            self._model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
        )
        return Reference(hidden, output_layer(self._model, self._topology, batch))


class Policy:
    """What is trained, with the models that help: a frozen reference policy and a critic."""

    def __init__(
        self,
        model: GPTModel,
        settings: LearnerSection,
        topology: Topology,
        *,
        decay_steps: int = 1,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
        needs_full_kl: bool = False,
    ) -> None:
        """Wrap a model.

        Args:
            model: what is trained.
            settings: of the optimizer.
            topology: this rank's place.
            decay_steps: where the learning rate's decay ends.
            reference: what KL is taken from, if it is.
            critic: what predicts returns, if something does.
            needs_full_kl: whether a loss is told the KL from the reference over all tokens.
        """
        self.model = model
        self.reference = reference
        self.critic = critic
        self._topology = topology
        self._needs_full_kl = needs_full_kl
        self._trained = Trainable(model, settings, topology, self._read, decay_steps=decay_steps)

    @property
    def replicas(self) -> Replicas:
        """Return how this replica speaks with the others."""
        return self._trained.replicas

    @property
    def lr(self) -> float:
        """Return the learning rate of the next optimizer update."""
        return self._trained.lr

    def end_step(self, *, trained_policy: bool = True) -> None:
        """Move the schedules on by one learner step, however many updates it held.

        The policy's waits where the step trained the critic alone.
        """
        if trained_policy:
            self._trained.end_step()
        if self.critic is not None:
            self.critic.end_step()

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return weights, optimizers and schedules in Megatron's description of who holds what."""
        state = self._trained.sharded_state(is_loading=is_loading)
        if self.critic is not None:
            state["critic"] = self.critic.sharded_state(is_loading=is_loading)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was loaded for ``sharded_state``; settings of this run stay."""
        self._trained.load_state(state)
        if self.critic is not None:
            self.critic.load_state(state["critic"])

    def logprobs(self, batch: PackedBatch) -> TokenLogprobs:
        """Return what the tempered policy says at each token.

        Index t belongs to the token at t; 0.0 outside the loss mask, where nothing was chosen.
        """
        return self._trained.forward(batch)

    @torch.no_grad()
    def proximal_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log probabilities [T] per microbatch under the present weights."""
        return [self.logprobs(batch).logprobs for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss_function: LossFunction[TokenLogprobs]
    ) -> tuple[Sums, float]:
        """Do one optimizer update; return the summed figures of all replicas, and the norm.

        Raises:
            NonFiniteError: on every rank, if the loss or gradient is not finite on any; weights and
                optimizer are as they were.
        """
        return self._trained.update(batches, loss_function)

    def _read(self, batch: PackedBatch, hidden: Tensor) -> TokenLogprobs:
        reference = None
        if self._needs_full_kl and self.reference is not None and torch.is_grad_enabled():
            reference = self.reference.said(batch)
        layer = output_layer(self.model, self._topology, batch)
        return token_logprobs(batch, hidden, layer, reference)


def output_layer(model: GPTModel, topology: Topology, batch: PackedBatch) -> OutputLayer:
    """Return a model's output layer as a batch uses it."""
    return OutputLayer(
        weight=output_weight(model),
        group=topology.tensor_group,
        vocab_size=model.hf_config.vocab_size,
        barred_ids=batch.end_token_ids if batch.end_barred is not None else (),
    )


def token_logprobs(
    batch: PackedBatch, hidden: Tensor, layer: OutputLayer, reference: Reference | None = None
) -> TokenLogprobs:
    """Return what is said about the token at each index, 0.0 outside the loss mask.

    The hidden state at t chooses the token at t + 1: what is said is shifted by one. The logits
    are divided by the temperature of their sequence, and tokens that end a response are
    barred where the engine barred them, as it does.
    """
    following = linear_logprobs(
        hidden.to(layer.weight.dtype),  # Megatron's wrapper for bfloat16 upcasts it
        layer,
        batch.token_ids.roll(-1),
        temperature=batch.temperature,
        barred=None if batch.end_barred is None else batch.end_barred.roll(-1),
        reference=reference,
    )
    zero = torch.zeros((), device=hidden.device)

    def aligned(values: Tensor) -> Tensor:
        return torch.where(batch.loss_mask, values.roll(1), zero)

    return TokenLogprobs(
        aligned(following.logprobs),
        aligned(following.entropy),
        None if following.kl is None else aligned(following.kl),
    )
