"""The policy under training and the reference policy. They know tensors, not trajectories.

Shapes: T tokens of B sequences laid end to end, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.algos.compose import PolicyOutputs
from slipstream.algos.linear_logprobs import (
    OutputLayer,
    Reference,
    linear_logprobs,
    squared_probabilities,
)
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import LearnerSection
from slipstream.learner.model.gpt import output_weight, packed_forward
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.critic import Critic
from slipstream.learner.training.replicas import Replicas
from slipstream.learner.training.trainable import LossFunction, Trainable

_REFERENCE_PREFIX = "reference."


class Teacher(Protocol):
    """Another policy, with its log-probabilities of the tokens of a batch."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch."""
        ...


class ReferencePolicy:
    """A frozen model; its log-probabilities are of the same tempered distributions."""

    def __init__(self, model: GPTModel, topology: Topology) -> None:
        """Freeze a model."""
        self._model = model.requires_grad_(False)
        self._topology = topology

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch."""
        return [token_logprobs(batch, *self.outputs(batch)).logprobs for batch in batches]

    @torch.no_grad()
    def outputs(self, batch: PackedBatch) -> Reference:
        """Return its hidden states and output layer, from which KL is taken in full."""
        hidden = packed_forward(
            self._model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
        )
        return Reference(hidden, output_layer(self._model, self._topology, batch))

    @torch.no_grad()
    def renew(self, model: GPTModel) -> None:
        """Copy the weights of a model of the same architecture."""
        ours = dict(self._model.named_parameters())
        for name, weights in model.named_parameters():
            ours[name].copy_(weights)

    def sharded_state(self) -> dict[str, Any]:
        """Return the weights as Megatron's sharded state."""
        state: dict[str, Any] = self._model.sharded_state_dict(prefix=_REFERENCE_PREFIX)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state read for ``sharded_state``."""
        self._model.load_state_dict(
            {name.removeprefix(_REFERENCE_PREFIX): value for name, value in state.items()}
        )


class Policy:
    """The policy under training, with the models beside it: reference policy, teacher, critic."""

    def __init__(
        self,
        model: GPTModel,
        settings: LearnerSection,
        topology: Topology,
        *,
        decay_steps: int = 1,
        reference: ReferencePolicy | None = None,
        renews_reference: bool = False,
        teacher: Teacher | None = None,
        critic: Critic | None = None,
        needs_full_kl: bool = False,
        needs_squares: bool = False,
    ) -> None:
        """Wrap a model, with the other models that the algorithm needs.

        ``decay_steps`` is where the learning rate's decay ends. ``renews_reference`` is set
        if ``renew_reference`` is called now and then, ``needs_full_kl`` if a loss needs the KL from
        the reference over all tokens, ``needs_squares`` if ``proximal`` sums squared probabilities.
        """
        self.model = model
        self.reference = reference
        self.renews_reference = renews_reference
        self.teacher = teacher
        self.critic = critic
        self._topology = topology
        self._needs_full_kl = needs_full_kl
        self._needs_squares = needs_squares
        self._trained = Trainable(model, settings, topology, self._read, decay_steps=decay_steps)

    @property
    def replicas(self) -> Replicas:
        """The data-parallel replicas, for sums over all of them."""
        return self._trained.replicas

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer update."""
        return self._trained.lr

    def end_step(self, *, trained_policy: bool = True) -> None:
        """Move the schedules on by one learner step, however many updates it held.

        The policy's waits where the step trained the critic alone.
        """
        if trained_policy:
            self._trained.end_step()
        if self.critic is not None:
            self.critic.end_step()

    def renew_reference(self) -> None:
        """Make the reference policy equal to the policy."""
        if self.reference is not None:
            self.reference.renew(self.model)

    def sharded_state(self, *, is_loading: bool, has_reference: bool = True) -> dict[str, Any]:
        """Return weights, optimizers and schedules as Megatron's sharded state.

        ``has_reference`` is whether the checkpoint has a reference policy that was renewed.
        """
        state = self._trained.sharded_state(is_loading=is_loading)
        if self.critic is not None:
            state["critic"] = self.critic.sharded_state(is_loading=is_loading)
        if self.reference is not None and self.renews_reference and has_reference:
            state["reference"] = self.reference.sharded_state()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state read for ``sharded_state``; settings of this run stay."""
        self._trained.load_state(state)
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        if self.reference is not None and "reference" in state:
            self.reference.load_state(state["reference"])

    def outputs(self, batch: PackedBatch) -> PolicyOutputs:
        """Return the tempered policy's figures for each token.

        Index t belongs to the token at t; 0.0 outside the loss mask, where nothing was chosen.
        """
        return self._trained.forward(batch)

    @torch.no_grad()
    def proximal(self, batches: Sequence[PackedBatch]) -> list[PolicyOutputs]:
        """Return the policy's figures for each token, per microbatch, without gradient."""
        return [self.outputs(batch) for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss_function: LossFunction[PolicyOutputs]
    ) -> tuple[dict[str, float], float]:
        """Do one optimizer update; return the summed figures of all replicas, and the norm.

        Raises:
            NonFiniteError: on every rank, if the loss or gradient is not finite on any; weights and
                optimizer are as they were.
        """
        return self._trained.update(batches, loss_function)

    def _read(self, batch: PackedBatch, hidden: Tensor) -> PolicyOutputs:
        reference = None
        if self._needs_full_kl and self.reference is not None and torch.is_grad_enabled():
            reference = self.reference.outputs(batch)
        layer = output_layer(self.model, self._topology, batch)
        outputs = token_logprobs(batch, hidden, layer, reference)
        if self._needs_squares and not torch.is_grad_enabled():
            return outputs._replace(squares=token_squares(batch, hidden, layer))
        return outputs


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
) -> PolicyOutputs:
    """Return the figures for the token at each index, 0.0 outside the loss mask.

    The hidden state at t chooses the token at t + 1: its figures are shifted by one. The logits
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
    return PolicyOutputs(
        _aligned(batch, following.logprobs),
        _aligned(batch, following.entropy),
        None if following.kl is None else _aligned(batch, following.kl),
    )


def token_squares(batch: PackedBatch, hidden: Tensor, layer: OutputLayer) -> Tensor:
    """Return the sum of the squared probabilities that each token was chosen from, [T].

    0.0 outside the loss mask; shifted, tempered and barred as ``token_logprobs`` has it.
    """
    following = squared_probabilities(
        hidden.to(layer.weight.dtype),
        layer,
        temperature=batch.temperature,
        barred=None if batch.end_barred is None else batch.end_barred.roll(-1),
    )
    return _aligned(batch, following)


def _aligned(batch: PackedBatch, following: Tensor) -> Tensor:
    """Shift figures from the place before each token to the token, 0.0 outside the mask. [T]."""
    return torch.where(batch.loss_mask, following.roll(1), torch.zeros_like(following))
