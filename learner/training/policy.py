"""The policy under training and the reference policy. They know tensors, not trajectories.

Shapes: T tokens of B sequences laid end to end, divided over c ranks of context parallelism; H
hidden size.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from slipstream.algos.compose import PolicyOutputs
from slipstream.algos.logprobs.linear_logprobs import Reference
from slipstream.algos.logprobs.sampling import OutputLayer
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import LearnerSection
from slipstream.learner.model.fused_gradients import main_gradient_of
from slipstream.learner.model.gpt import output_weight
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.critic import Critic
from slipstream.learner.training.offload import Offload, Resident
from slipstream.learner.training.passes import ModelPasses, RowHead
from slipstream.learner.training.pipeline_clock import PipelineClock, bubble_share
from slipstream.learner.training.states import Share, token_logprobs, token_squares
from slipstream.learner.training.trainable import LossFunction, Trainable
from slipstream.wire.settings.sections import RoutingReplay

_REFERENCE_PREFIX = "reference."


class Teacher(Protocol):
    """Another policy, with its log-probabilities of the tokens of a batch."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch."""
        ...


class ReferencePolicy(RowHead):
    """A frozen model; its log-probabilities are of the same tempered distributions."""

    is_base = False  # True for the policy without its adapters: no separate model

    def __init__(
        self, model: RankModel, topology: Topology, *, offload: Offload | None = None
    ) -> None:
        """Freeze a model; ``offload`` is shared by all models of this rank."""
        offload = offload or Offload()
        frozen = Resident(model.requires_grad_(False).parameters, is_constant=True)
        weights = offload.take("weights", frozen)
        self._take(model, topology, offload, weights)
        self._offload.use()

    def _take(
        self, model: RankModel, topology: Topology, offload: Offload, weights: Resident
    ) -> None:
        self._model = model
        self._topology = topology
        self._passes = ModelPasses(model.chunks, self, topology)
        self._offload = offload
        self.weights = weights

    def _frozen(self) -> AbstractContextManager[None]:
        """Put the model in this policy's form for a block."""
        return nullcontext()

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log-probabilities [T] per microbatch."""
        self._offload.use(self.weights)
        with self._frozen():
            return self._passes.forward(batches)

    @override
    def read(self, _number: int, share: Share) -> Tensor:
        """Return the log-probabilities [T] of a microbatch."""
        layer = output_layer(self._model, self._topology, share.batch)
        return token_logprobs(share, layer).logprobs

    @torch.no_grad()
    def states(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return hidden states [T/c, H] per microbatch on the last stage, [] elsewhere."""
        self._offload.use(self.weights)
        with self._frozen():
            return self._passes.hidden(batches)

    @torch.no_grad()
    def outputs(self, batch: PackedBatch, states: Tensor | None = None) -> Reference:
        """Return its hidden states and output layer, for the full KL.

        Without ``states``, hidden states are computed here, which needs a single stage. The weights
        must be on the device: they are used together with the policy's.
        """
        if states is None:
            (states,) = self._passes.hidden([batch])
        return Reference(states, output_layer(self._model, self._topology, batch))

    @torch.no_grad()
    def renew(self, model: RankModel, weights_of_model: Resident) -> None:
        """Copy the weights of a model of the same architecture."""
        self._offload.use(self.weights, weights_of_model)
        self.weights.has_changed()
        ours = dict(self._model.named_weights())
        for name, weights in model.named_weights():
            ours[name].copy_(weights)

    def sharded_state(self) -> dict[str, Any]:
        """Return the weights as Megatron's sharded state."""
        return self._model.sharded_state_dict(prefix=_REFERENCE_PREFIX)

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state read for ``sharded_state``."""
        self._offload.use(self.weights)
        self.weights.has_changed()
        self._model.load_state_dict(state, _REFERENCE_PREFIX)


class BasePolicy(ReferencePolicy):
    """The policy without its adapters: the reference policy that takes no memory."""

    is_base = True

    def __init__(
        self, model: RankModel, topology: Topology, *, offload: Offload, weights: Resident
    ) -> None:
        """Share the model, and the resident of its ``weights``, with the policy."""
        self._take(model, topology, offload, weights)

    @override
    def _frozen(self) -> AbstractContextManager[None]:
        adapters = self._model.adapters
        return adapters.off() if adapters is not None else nullcontext()


class Policy(Trainable[PolicyOutputs]):
    """The policy under training, with its other models: reference policy, teacher, critic."""

    def __init__(
        self,
        model: RankModel,
        settings: LearnerSection,
        topology: Topology,
        *,
        decay_steps: int = 1,
        reference: ReferencePolicy | None = None,
        base_is_reference: bool = False,
        renews_reference: bool = False,
        teacher: Teacher | None = None,
        critic: Critic | None = None,
        needs_full_kl: bool = False,
        needs_squares: bool = False,
        offload: Offload | None = None,
        replay: RoutingReplay = "off",
    ) -> None:
        """Wrap a model, with the other models that the algorithm needs.

        The learning rate's decay ends at ``decay_steps``. With ``base_is_reference`` the model
        without its adapters replaces a ``reference``. ``renews_reference`` is set if
        ``renew_reference`` will be called, ``needs_full_kl`` if a loss needs the KL from the
        reference over all tokens, ``needs_squares`` if ``proximal`` sums squared probabilities.
        ``offload`` is shared by all models of this rank; ``replay`` is that of ``ModelPasses``,
        for this model only.
        """
        super().__init__(
            model, settings, topology, decay_steps=decay_steps, offload=offload, replay=replay
        )
        if base_is_reference:
            reference = BasePolicy(model, topology, offload=self._offload, weights=self.weights)
        self.reference = reference
        self.renews_reference = renews_reference
        self.teacher = teacher
        self.critic = critic
        self._needs_full_kl = needs_full_kl
        self._needs_squares = needs_squares
        self._reference_states: list[Tensor] = []  # states for one update, by microbatch
        self._pipeline_clock = PipelineClock() if topology.sizes.pipeline > 1 else None

    @override
    def end_step(self, *, trained_policy: bool = True) -> None:
        """Move the schedules on by one learner step, however many updates it held.

        The policy's schedule waits if the step trained only the critic.
        """
        if trained_policy:
            super().end_step()
        if self.critic is not None:
            self.critic.end_step()

    def renew_reference(self) -> None:
        """Make the reference policy equal to the policy."""
        if self.reference is not None:
            self.bring_weights()
            self.reference.renew(self.model, self.weights)

    @override
    def sharded_state(self, *, is_loading: bool, has_reference: bool = True) -> dict[str, Any]:
        """Return weights, optimizers and schedules as Megatron's sharded state.

        ``has_reference`` is True if the checkpoint has a renewed reference policy.
        """
        state = super().sharded_state(is_loading=is_loading)
        if self.critic is not None:
            state["critic"] = self.critic.sharded_state(is_loading=is_loading)
        if self.reference is not None and self.renews_reference and has_reference:
            state["reference"] = self.reference.sharded_state()
        return self._offload.put_away(state)

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state read for ``sharded_state``; settings of this run stay."""
        super().load_state(state)
        if self.critic is not None:
            self.critic.load_state(state["critic"])
        if self.reference is not None and "reference" in state:
            self.reference.load_state(state["reference"])

    @torch.no_grad()
    def proximal(self, batches: Sequence[PackedBatch]) -> list[PolicyOutputs]:
        """Return the tempered policy's figures for each token, per microbatch, without gradient.

        Index t belongs to the token at t. Figures are 0.0 outside the loss mask, where the policy
        chose nothing.
        """
        return self.forward(batches)

    @override
    def update(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction[PolicyOutputs],
        *,
        beside: Sequence[Resident] = (),
    ) -> tuple[dict[str, float], float]:
        """Do one optimizer update; for a full KL the reference policy is there too."""
        # Coupled ranks run the reference's passes together, not inside a loss: a microbatch without
        # tokens has no loss, and a pipeline has other microbatches on the way.
        if self._needs_full_kl and self.reference is not None:
            beside = [*beside, self.reference.weights]
            if self._topology.sizes.couples_replicas or self.reference.is_base:
                self._reference_states = self.reference.states(batches)
        clock = self._pipeline_clock
        try:
            with clock.timing(self.model.config) if clock is not None else nullcontext():
                return super().update(batches, loss_function, beside=beside)
        finally:
            self._reference_states = []

    def pipeline_figures(self) -> dict[str, float]:
        """Return the bubble's share of the updates since the last call; every rank calls this.

        Empty without pipeline stages, or without an update.
        """
        clock = self._pipeline_clock
        share = bubble_share(clock.take()) if clock is not None else None
        return {} if share is None else {"throughput/bubble": share}

    def on_all_stages(self, values: Sequence[Tensor], like: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the last stage's values [T] per microbatch on all stages."""
        if self._topology.sizes.pipeline == 1:
            return list(values)
        lengths = [len(batch.token_ids) for batch in like]
        joined = torch.cat(list(values)) if values else None
        whole = self.passes.on_all_stages(joined, (sum(lengths),))
        return list(torch.split(whole.float(), lengths))

    @override
    def read(self, number: int, share: Share) -> PolicyOutputs:
        """Return the figures of a microbatch, [T]; with the KL from the reference if it trains."""
        reference = None
        if self._needs_full_kl and self.reference is not None and torch.is_grad_enabled():
            states = self._reference_states[number] if self._reference_states else None
            reference = self.reference.outputs(share.batch, states)
        layer = output_layer(self.model, self._topology, share.batch)
        outputs = token_logprobs(share, layer, reference)
        if self._needs_squares and not torch.is_grad_enabled():
            return outputs._replace(squares=token_squares(share, layer))
        return outputs

    @property
    @override
    def num_rows(self) -> int:
        """Number of figures known without gradient."""
        return 3 if self._needs_squares else 2

    @override
    def stacked(self, output: PolicyOutputs) -> Tensor:
        """Return the figures known without gradient as rows, [2 or 3, T]."""
        rows = [output.logprobs, output.entropy]
        return torch.stack(rows if output.squares is None else [*rows, output.squares])

    @override
    def unstacked(self, values: Tensor) -> PolicyOutputs:
        """Return the figures in these rows."""
        logprobs, entropy, *squares = values
        return PolicyOutputs(logprobs, entropy, squares=squares[0] if squares else None)


def output_layer(model: RankModel, topology: Topology, batch: PackedBatch) -> OutputLayer:
    """Return a model's output layer in the form that a batch uses."""
    weight = output_weight(model)
    return OutputLayer(
        weight=weight,
        group=topology.tensor_group,
        vocab_size=model.hf_config.vocab_size,
        barred_ids=batch.end_token_ids if batch.end_barred is not None else (),
        gradient=main_gradient_of(weight, model.config),
    )
