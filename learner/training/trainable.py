"""A model under training: gradients, optimizer, schedule. The loss is the caller's.

Shapes: T tokens of B sequences laid end to end, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from slipstream.algos.diagnostics import Sums, add_sums
from slipstream.learner.batches.orders import NonFiniteError
from slipstream.learner.batches.packing import PackedBatch
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.learner.model.gpt import packed_forward
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.optimizer import (
    gradient_norm,
    put_steps_in_place,
    step_with,
    use_fused_kernels,
)
from slipstream.learner.training.replicas import Replicas
from slipstream.learner.training.schedule import make_scheduler

Output = TypeVar("Output")
LossFunction = Callable[[int, PackedBatch, Output], tuple[Tensor, Sums]]
"""(microbatch number, batch, outputs of the model) -> (loss [], sums to log)."""


class Trainable(Generic[Output]):
    """A Megatron model with its optimizer. The loss is normalized globally by the caller."""

    def __init__(
        self,
        model: GPTModel,
        settings: LearnerSection,
        topology: Topology,
        read: Callable[[PackedBatch, Tensor], Output],
        *,
        decay_steps: int,
    ) -> None:
        """Wrap a model; ``decay_steps`` is where the learning rate's decay ends.

        ``read`` turns a batch and the model's output for it [T, ...] into inputs of a loss.
        """
        self.model = model
        self.replicas = Replicas(topology)
        self._topology = topology
        self._read = read
        config = model.config
        config.finalize_model_grads_func = _finalize
        wrapped = Float16Module(config, model) if config.bf16 else model
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped
        )
        self._ddp.broadcast_params()
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
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
            ),
            [self._ddp],
        )
        if device.device().type == "cuda":
            use_fused_kernels(self._optimizer)
        self._scheduler = make_scheduler(self._optimizer, settings, decay_steps=decay_steps)

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def end_step(self) -> None:
        """Move the schedule on by one learner step, however many updates it held."""
        self._scheduler.step(1)

    def sharded_state(self, *, is_loading: bool, prefix: str = "") -> dict[str, Any]:
        """Return weights, optimizer and schedule as Megatron's sharded state."""
        model = self.model.sharded_state_dict(prefix=prefix)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state(self, state: dict[str, Any], *, prefix: str = "") -> None:
        """Load the state read for ``sharded_state``; settings of this run stay."""
        weights = {name.removeprefix(prefix): value for name, value in state["model"].items()}
        self.model.load_state_dict(weights)
        groups = self._optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, ours in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(ours)
        put_steps_in_place(self._optimizer)
        self._scheduler.load_state_dict(state["scheduler"])

    def forward(self, batch: PackedBatch) -> Output:
        """Return the outputs of the model for a batch."""
        return self._read(batch, _outputs(self._ddp, batch))

    def update(
        self, batches: Sequence[PackedBatch], loss_function: LossFunction[Output]
    ) -> tuple[dict[str, float], float]:
        """Do one optimizer update; return the summed figures of all replicas, and the norm.

        The host waits for the GPU once, for all figures together.

        Raises:
            NonFiniteError: on every rank, if the loss or gradient is not finite on any; weights and
                optimizer are as they were.
        """
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals: Sums = {}

        def forward_step(
            iterator: Iterator[tuple[int, PackedBatch]], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Sums]]]:
            number, batch = next(iterator)

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, Sums]:
                loss, sums = loss_function(number, batch, self._read(batch, output))
                sums["loss"] = loss.detach()
                add_sums(totals, sums)
                return loss, torch.ones((), dtype=torch.int, device=loss.device), sums

            return _outputs(model, batch), loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(batches)),
            model=[self._ddp],
            num_microbatches=len(batches),
            seq_length=max(len(batch.token_ids) for batch in batches),
            micro_batch_size=1,
            forward_only=False,
        )
        summed = self.replicas.combined(totals)
        overflow = self._optimizer.prepare_grads()
        norm = gradient_norm(self._optimizer).double()
        is_bad = (~torch.isfinite(torch.stack([summed["loss"], norm])).all() | overflow).double()
        if self._topology.world_size > 1:
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        *values, grad_norm, any_bad = torch.stack([*summed.values(), norm, is_bad]).tolist()
        figures = dict(zip(summed, values, strict=True))
        if any_bad:
            raise NonFiniteError(
                f"the loss is {figures['loss']:g}, the norm of its gradient {grad_norm:g}"
            )
        step_with(self._optimizer, grad_norm)
        return figures, grad_norm


def _outputs(model: torch.nn.Module, batch: PackedBatch) -> Tensor:
    return packed_forward(
        model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
    )


def _finalize(
    model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Sum gradients over ranks. The loss is divided by the global token count already."""
    megatron_finalize(model, None, **kwargs)
