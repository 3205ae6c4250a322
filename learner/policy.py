"""The policy under training: model, gradients, optimizer. Knows tensors, not trajectories.

Shapes: T tokens of B sequences laid end to end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from algos.logprobs import vocab_parallel_logprobs
from learner.broadcast import any_rank
from learner.collate import PackedBatch
from learner.config import LearnerSection
from learner.model import packed_logits
from learner.orders import NonFiniteError
from learner.schedule import make_scheduler
from learner.topology import Topology

_BARRED_LOGIT = -1e30  # probability 0 without an infinity in the gradient

Sums = dict[str, Tensor]
LossFunction = Callable[[int, PackedBatch, Tensor, Tensor], tuple[Tensor, Sums]]
"""(microbatch number, batch, logprobs [T], entropy [T]) -> (loss [], sums to log)."""


class Policy:
    """A Megatron model with its optimizer. The loss is normalized globally by the caller."""

    def __init__(
        self,
        model: GPTModel,
        settings: LearnerSection,
        topology: Topology,
        *,
        decay_steps: int = 1,
    ) -> None:
        """Wrap a model; ``decay_steps`` is where the learning rate's decay ends."""
        self.model = model
        self._topology = topology
        self._vocab_size: int = model.hf_config.vocab_size
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
        self._scheduler = make_scheduler(self._optimizer, settings, decay_steps=decay_steps)

    @property
    def lr(self) -> float:
        """Return the learning rate of the next optimizer update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def end_step(self) -> None:
        """Move the schedule on by one learner step, however many updates it held."""
        self._scheduler.step(1)

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return weights, optimizer and schedule in Megatron's description of who holds what."""
        model = self.model.sharded_state_dict()
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was loaded for ``sharded_state``; settings of this run stay."""
        self.model.load_state_dict(state["model"])
        groups = self._optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, ours in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(ours)
        self._scheduler.load_state_dict(state["scheduler"])

    def logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (log probability [T], entropy [T]) of the tempered policy at each token.

        Index t belongs to the token at t; 0.0 outside the loss mask, where nothing was chosen.
        """
        logits = packed_logits(
            self._ddp, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
        )
        return self._aligned(logits, batch)

    @torch.no_grad()
    def proximal_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the log probabilities [T] per microbatch under the present weights."""
        return [self.logprobs(batch)[0] for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss_function: LossFunction
    ) -> tuple[Sums, float]:
        """Do one optimizer update; return the summed figures of all replicas, and the norm.

        Raises:
            NonFiniteError: on every rank, if the loss or gradient is not finite on any; weights and
                optimizer are as they were.
        """
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        numbered = iter(enumerate(batches))
        totals: Sums = {}

        def forward_step(
            iterator: Iterator[tuple[int, PackedBatch]], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Sums]]]:
            number, batch = next(iterator)
            logits = packed_logits(
                model, batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen
            )

            def loss_of(output: Tensor) -> tuple[Tensor, Tensor, Sums]:
                loss, sums = loss_function(number, batch, *self._aligned(output, batch))
                sums["loss"] = loss.detach()
                for name, value in sums.items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
                return loss, torch.ones((), dtype=torch.int, device=loss.device), sums

            return logits, loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=numbered,
            model=[self._ddp],
            num_microbatches=len(batches),
            seq_length=max(len(batch.token_ids) for batch in batches),
            micro_batch_size=1,
            forward_only=False,
        )
        summed = self._sum_over_replicas(totals)
        overflow = self._optimizer.prepare_grads()
        loss, grad_norm = float(summed["loss"]), float(self._optimizer.get_grad_norm())
        is_bad = overflow or not math.isfinite(loss) or not math.isfinite(grad_norm)
        if any_rank(is_bad, world_size=self._topology.world_size):
            raise NonFiniteError(f"the loss is {loss:g}, the norm of its gradient {grad_norm:g}")
        self._optimizer.step()
        return summed, grad_norm

    def _aligned(self, logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Logits [T, V/tp] at t predict the token at t + 1: shift what they say by one."""
        targets = batch.token_ids.roll(-1)
        tempered = self._without_ends(logits / batch.temperature.unsqueeze(-1), batch)
        following, entropy_after = vocab_parallel_logprobs(
            tempered,
            targets,
            group=self._topology.tensor_group,
            vocab_size=self._vocab_size,
        )
        zero = torch.zeros((), device=logits.device)
        return (
            torch.where(batch.loss_mask, following.roll(1), zero),
            torch.where(batch.loss_mask, entropy_after.roll(1), zero),
        )

    def _without_ends(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        """Bar the tokens that end a response where the engine barred them, as it does.

        Logits are [T, V/tp]; row t chooses the token at t + 1.
        """
        if batch.end_barred is None:
            return logits
        width = logits.shape[-1]
        first = width * self._topology.tensor_parallel_rank
        columns = torch.arange(first, first + width, device=logits.device)
        ends = torch.isin(columns, torch.tensor(batch.end_token_ids, device=logits.device))
        barred = batch.end_barred.roll(-1).unsqueeze(-1) & ends
        return logits.masked_fill(barred, _BARRED_LOGIT)

    def _sum_over_replicas(self, totals: Sums) -> Sums:
        names = sorted(totals)
        stacked = torch.stack([totals[name].float() for name in names])
        if self._topology.data_parallel > 1:
            torch.distributed.all_reduce(stacked, group=self._topology.data_group)
        return dict(zip(names, stacked, strict=True))


def _finalize(
    model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Sum gradients over ranks. The loss is divided by the global token count already."""
    megatron_finalize(model, None, **kwargs)
