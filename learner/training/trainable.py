"""A model under training: gradients, optimizer, schedule. The loss is the caller's.

Shapes: T tokens of B sequences laid end to end, H hidden size.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from slipstream.algos.diagnostics import Sums, add_sums
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import LearnerSection
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.offload import Offload, Resident, storage_id
from slipstream.learner.training.optimizer import (
    MegatronOptimizer,
    begin_steps,
    gradient_norm,
    leave_out_stubs,
    make_scheduler,
    narrow_moments,
    optimizer_tensors,
    overrides,
    put_steps_in_place,
    step_with,
    use_fused_kernels,
    without_hybrid_settings,
)
from slipstream.learner.training.passes import Head, ModelPasses
from slipstream.learner.training.replicas import Replicas
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.sections import RoutingReplay

# Megatron's way to write a distributed optimizer that every layout can read. Each part goes to one
# rank's host, and not to the GPUs of all.
_OF_ANY_LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
Output = TypeVar("Output")
LossFunction = Callable[[int, PackedBatch, Output], tuple[Tensor, Sums]]
"""(microbatch number, batch, outputs of the model) -> (loss [], sums to log)."""


class Trainable(Head[Output]):
    """A Megatron model with its optimizer. The loss is normalized globally by the caller.

    A subclass turns hidden states into inputs of a loss. Where several ranks hold the same weights,
    each updates a part of them: gradients are summed while the backward pass computes others, and
    updated parts are gathered by the next passes, layer by layer, or by ``bring_weights``.
    """

    prefix: ClassVar[str] = ""  # starts the names of its tensors in a checkpoint
    bucket_parameters: ClassVar[int | None] = None  # exchanged at a time; None is Megatron's choice

    def __init__(
        self,
        model: RankModel,
        settings: LearnerSection,
        topology: Topology,
        *,
        decay_steps: int = 1,
        offload: Offload | None = None,
        replay: RoutingReplay = "off",
    ) -> None:
        """Wrap a model; the learning rate's decay ends at ``decay_steps``.

        ``offload`` is shared by all models of this rank; ``replay`` is that of ``ModelPasses``.

        Raises:
            ConfigError: weights are float32, and a share of the optimizer should be on the host.
        """
        if settings.optimizer_offload_fraction and not model.config.bf16:
            raise ConfigError(
                f"learner.optimizer_offload_fraction = {settings.optimizer_offload_fraction:g} "
                'needs weights in bfloat16: learner.dtype = "auto" is float32 on a CPU'
            )
        self.model = model
        self.replicas = Replicas(topology)
        self._topology = topology
        has_copies = topology.sizes.has_copies(
            topology.world_size, has_experts=model.config.num_moe_experts is not None
        )
        # A hybrid optimizer has this form on any number of ranks.
        self.divides_optimizer = has_copies or settings.optimizer_offload_fraction > 0
        # Adapters are small, and read outside of the modules whose hooks wait for weights.
        self._gathers_late = has_copies and model.adapters is None
        self._is_scattered = False  # True if other ranks' parts of the weights are yet to come
        exchanges = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.divides_optimizer,
            overlap_grad_reduce=has_copies,
            overlap_param_gather=self._gathers_late,
            bucket_size=self.bucket_parameters,
        )
        self._chunks = _wrapped_chunks(model, exchanges)
        self._overlaps = exchanges.overlap_grad_reduce
        self.attach()
        list(model.named_weights())  # those of single experts are made while weights are here
        self.passes = ModelPasses(self._chunks, self, topology, replay=replay)
        self._optimizer = _optimizer_of(
            self._chunks,
            settings,
            model.config,
            exchanges,
            trains_vision=model.hf_config.trains_vision,
        )
        self._scheduler = make_scheduler(self._optimizer, settings, decay_steps=decay_steps)
        self._offload = offload or Offload()
        take, gradients = self._offload.take, Resident(self._gradient_buffers, keeps_content=False)
        self.weights = take("weights", Resident(model.parameters))
        self._gradients = take("gradients", gradients)
        self._state = take("optimizer", Resident(self._optimizer_state))
        self._offload.use()

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def attach(self) -> None:
        """Have passes through the model's layers use its adapters, and sum their gradients.

        Several policies of one frozen model call this in turn, before any other method.
        """
        if self.model.adapters is not None:
            self.model.adapters.attach()
        if self._overlaps:
            _overlap(self.model.config, self._chunks)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's tensors: weights, gradients, main weights, moments.

        Tensors on the host do not count. Main weights are the optimizer's own, in float32; they and
        moments are those after an update.
        """
        return {
            "weights": _num_bytes(self.model.parameters()),
            "gradients": _num_bytes(self._gradient_buffers()),
            "main weights": _num_bytes(self._main_weights()),
            "moments": _num_bytes(optimizer_tensors(self._optimizer)[1]),
        }

    def _gradient_buffers(self) -> list[Tensor]:
        return [
            buffer.grad_data
            for chunk in self._chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def _main_weights(self) -> list[Tensor]:
        """Return the optimizer's own weights; none where it updates the model's."""
        own = {storage_id(weight) for weight in self.model.parameters()}
        weights, _ = optimizer_tensors(self._optimizer)
        return [weight for weight in weights if storage_id(weight) not in own]

    def _optimizer_state(self) -> list[Tensor]:
        """Return the optimizer's tensors besides the model's weights."""
        return self._main_weights() + optimizer_tensors(self._optimizer)[1]

    def bring_weights(self) -> None:
        """Bring the weights of ``model`` to the device, all of them; every rank calls this."""
        self._use_whole_weights()

    def end_step(self) -> None:
        """Move the schedule on by one learner step, however many updates it held."""
        self._scheduler.step(1)

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return weights, optimizer and schedule as Megatron's sharded state."""
        self._use_whole_weights(self._state)
        model = self.model.sharded_state_dict(prefix=self.prefix)
        if is_loading or self.divides_optimizer:  # Megatron writes no divided one without a state
            begin_steps(self._optimizer)
        optimizer = self._optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=_OF_ANY_LAYOUT
        )
        without_hybrid_settings(optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state read for ``sharded_state``; settings of this run stay."""
        self._use_whole_weights(self._state)
        self.model.load_state_dict(state["model"], self.prefix)
        groups = self._optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, ours in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(ours)
        put_steps_in_place(self._optimizer)
        self._scheduler.load_state_dict(state["scheduler"])

    def forward(self, batches: Sequence[PackedBatch]) -> list[Output]:
        """Return the outputs per microbatch."""
        self._offload.use(self.weights)
        outputs = self.passes.forward(batches)
        self._is_scattered = False
        return outputs

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction[Output],
        *,
        beside: Sequence[Resident] = (),
    ) -> tuple[dict[str, float], float]:
        """Do one optimizer update; return the summed figures of all replicas, and the norm.

        The host waits for the GPU once, after the update, for all figures together; with pipeline
        stages once more, for the last stage's results. Further residents stay on the device for the
        loss.

        Raises:
            NonFiniteError: on every rank, if the loss or gradient is not finite on any; weights and
                optimizer are unchanged.
        """
        self._offload.use(self.weights, self._gradients, *beside)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals: Sums = {}

        def loss_of(number: int, batch: PackedBatch, output: Output) -> Tensor:
            loss, sums = loss_function(number, batch, output)
            sums["loss"] = loss.detach()
            add_sums(totals, sums)
            return loss

        self.passes.train(batches, loss_of)
        overflow = self._optimizer.prepare_grads()
        norm = gradient_norm(self._optimizer).double()
        mine = [norm, totals["loss"].double()] if totals else [norm]  # the last stage has a loss
        is_bad = (~torch.isfinite(torch.stack(mine)).all() | overflow).double()
        if self._topology.world_size > 1:
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        self._offload.use(self.weights, self._gradients, self._state)
        step_with(self._optimizer, norm, is_bad)
        self._is_scattered = self._gathers_late
        summed = self._summed(totals)
        *values, grad_norm, any_bad = torch.stack([*summed.values(), norm, is_bad]).tolist()
        figures = dict(zip(summed, values, strict=True))
        if any_bad:
            raise NonFiniteError(
                f"the loss is {figures['loss']:g}, the norm of its gradient {grad_norm:g}"
            )
        return figures, grad_norm

    def _use_whole_weights(self, *beside: Resident) -> None:
        self._offload.use(self.weights, *beside)
        if self._is_scattered:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        self._is_scattered = False

    def _summed(self, totals: Sums) -> Sums:
        """Return the sums of all replicas, on every pipeline stage."""
        names = self.passes.names_on_all_stages(list(totals))
        if self._topology.sizes.pipeline > 1:
            own = torch.stack([totals[name].double() for name in names]) if totals else None
            values = self.passes.on_all_stages(own, (len(names),))
            totals = dict(zip(names, values, strict=True))
        return self.replicas.combined(totals)


def _wrapped_chunks(
    model: RankModel, exchanges: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Return a model's chunks with buffers for their gradients, equal on all replicas."""
    config = model.config
    config.finalize_model_grads_func = _finalize
    chunks = [
        DistributedDataParallel(
            config,
            exchanges,
            Float16Module(config, chunk) if config.bf16 else chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(model.chunks)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def _optimizer_of(
    chunks: list[DistributedDataParallel],
    settings: LearnerSection,
    config: TransformerConfig,
    exchanges: DistributedDataParallelConfig,
    *,
    trains_vision: bool,
) -> MegatronOptimizer:
    share_on_host = settings.optimizer_offload_fraction
    how = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr_min,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_epsilon,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=exchanges.use_distributed_optimizer,
        overlap_param_gather=exchanges.overlap_param_gather,
        optimizer_cpu_offload=share_on_host > 0,
        optimizer_offload_fraction=share_on_host,
        overlap_cpu_optimizer_d2h_h2d=share_on_host > 0,
        use_precision_aware_optimizer=share_on_host > 0,
    )
    optimizer = get_megatron_optimizer(
        how, chunks, config_overrides=overrides(how, trains_vision=trains_vision)
    )
    leave_out_stubs(optimizer)
    if share_on_host:
        gc.collect()  # Megatron's first optimizer, of whole weights, refers to itself
    if settings.moments_dtype == "bfloat16":
        narrow_moments(optimizer)
    use_fused_kernels(optimizer)
    return optimizer


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().nbytes())


def _overlap(config: TransformerConfig, chunks: Sequence[DistributedDataParallel]) -> None:
    """Have Megatron's schedules sum gradients in the backward pass of the last microbatch."""
    syncs = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    several = len(chunks) > 1
    config.no_sync_func, config.grad_sync_func = syncs if several else (syncs[0][0], syncs[1][0])


def _finalize(
    model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Sum gradients over ranks. The loss is already divided by the global token count."""
    megatron_finalize(model, None, **kwargs)
