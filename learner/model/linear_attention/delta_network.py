"""A gated delta network in the place of attention, over packed sequences.

Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464), figure 1, as in Qwen3-Next and Qwen3.5: queries,
keys and values pass a short convolution, the output a norm and a gate. Rows of the projection are
ordered by heads of keys: each has its query, key, values, gates, strengths and decays, so that
ranks of tensor and context parallelism take whole heads with all that is theirs.

Shapes: T tokens of a rank of context parallelism, T/t of them with sequence parallelism, T' of all
its ranks; K heads of keys of this rank with r heads of values each; d channels of a query and a
key, v of a value.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from typing_extensions import override

from slipstream.learner.model.attention import PackedLayout
from slipstream.learner.model.computed_again import computed_again
from slipstream.learner.model.cuda_attention import has_kernel
from slipstream.learner.model.device import device
from slipstream.learner.model.linear_attention.delta_rule import (
    delta_rule_on_gpu,
    gated_delta_rule,
    kernel_trouble,
    short_convolution,
)
from slipstream.learner.parallel import HeadShares
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig

# Axes that tensor parallelism divides.
_DIVIDED = {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0}


class DeltaNetwork(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """Takes the place of Megatron's self-attention in layers of linear attention.

    ``A_log``, the decays, are part of the weights but no parameter: they stay as they were, in
    float32. In bfloat16 a decay would be off by up to 0.8 percent at every token, and no update of
    a usual rate would change it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        hf: HfConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **_options: object,
    ) -> None:
        super().__init__(config=config)
        where = torch.empty(0, dtype=config.params_dtype, device=device())
        if has_kernel(where) and (trouble := kernel_trouble()):
            raise ConfigError(
                f"run.model ({hf.model_type}) has linear attention, whose kernels cannot be "
                f'imported ({trouble}): pip install "slipstream[linear-attention]"'
            )
        self.layer_number = layer_number
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self._tensor_group, ranks = groups.tp, groups.tp.size()
        self._heads = hf.linear_num_key_heads // ranks
        self._values = hf.linear_num_value_heads // hf.linear_num_key_heads
        self._key_size, self._value_size = hf.linear_key_head_dim, hf.linear_value_head_dim
        sizes, dtype = hf.sizes, config.params_dtype
        linear: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": groups.tp,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sizes["linear_projections"] + sizes["linear_gates"],
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        mixed = (2 * sizes["linear_keys"] + sizes["linear_values"]) // ranks
        self.conv1d = torch.nn.Conv1d(
            mixed, mixed, sizes["taps"], groups=mixed, bias=False, dtype=dtype
        )
        count = self._heads * self._values
        self.A_log: Tensor
        self.register_buffer("A_log", None)
        self._hold(torch.empty(count, dtype=torch.float32).uniform_(1.0, 16.0).log_())
        self.dt_bias = torch.nn.Parameter(torch.ones(count, dtype=dtype))
        for divided in (self.conv1d.weight, self.dt_bias):
            tensor_parallel.set_tensor_model_parallel_attributes(divided, True, 0, 1)
        self.norm = torch.nn.RMSNorm(self._value_size, eps=hf.rms_norm_eps, dtype=dtype)
        self.out_proj = RowParallelLinear(
            sizes["linear_values"],
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep decays in float32 where Megatron turns the model into a narrow type."""
        rates = self.A_log
        super()._apply(fn, recurse)
        self._hold(rates.detach().to(self.dt_bias.device))
        return self

    def _hold(self, rates: Tensor) -> None:
        self.A_log = rates
        tensor_parallel.set_tensor_model_parallel_attributes(rates, True, 0, 1)

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_args: object,
        packed_seq_params: PackedLayout,
        **_options: object,
    ) -> tuple[Tensor, None]:
        """Return the layer's output, [T/t, 1, H] for [T/t, 1, H], and no bias."""
        projected, _ = self.in_proj(hidden_states)
        by_head = projected.view(len(projected), self._heads, -1)
        mixed, gate, strength, decay = torch.split(
            by_head,
            [
                2 * self._key_size + self._values * self._value_size,
                self._values * self._value_size,
                self._values,
                self._values,
            ],
            dim=-1,
        )
        output = self._of_sequences(torch.cat([mixed, strength, decay], dim=-1), packed_seq_params)
        output = output.reshape(-1, self._heads * self._values, self._value_size)
        # Every rank adds to the weight's gradient.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, self._tensor_group)
        gated = computed_again(self._gated, output, gate.reshape_as(output), weight)
        result, _ = self.out_proj(gated.flatten(1).unsqueeze(1))
        return result, None

    def _gated(self, output: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of each head times its gate, [T, K r, v]."""
        size = (self._value_size,)
        normed = F.rms_norm(output.float(), size, eps=self.norm.eps).to(output.dtype)
        return (normed * weight * F.silu(gate.float())).to(output.dtype)

    def _of_sequences(self, heads: Tensor, layout: PackedLayout) -> Tensor:
        """Return the outputs of heads [T, K, 2d + rv + 2r], [T, K, rv], by whole sequences."""
        split, shared = layout.split, layout.shared
        if shared is not None:
            return self._computed(shared.of_all(heads), 0, layout).index_select(0, shared.computed)
        if split.group is None:
            return self._computed(heads, 0, layout)
        # Every rank has whole sequences of its own heads, whether attention has rings or not.
        by_head = replace(split, shares=HeadShares(split.ranks, 1))
        (heads,) = by_head.exchanged(heads)
        order = split.order(heads.device)
        if order is not None:
            heads = heads[order.argsort()]
        output = self._computed(heads, split.rank, layout)
        return by_head.returned(output if order is None else output[order])

    def _computed(self, heads: Tensor, part: int, layout: PackedLayout) -> Tensor:
        """Return the outputs of the heads of a part of this rank's, [T', K', rv]."""
        count, values = heads.size(1), self._values
        mine = slice(part * count, (part + 1) * count)
        widths = [heads.size(-1) - 2 * values, values, values]
        mixed, strength, decay = torch.split(heads, widths, dim=-1)
        weight = self.conv1d.weight.view(self._heads, mixed.size(-1), -1)[mine].flatten(0, 1)
        mixed = computed_again(short_convolution, mixed.flatten(1), weight, layout.positions)
        query, key, value = torch.split(
            mixed.view(len(mixed), count, -1),
            [self._key_size, self._key_size, values * self._value_size],
            dim=-1,
        )
        rates, bias = (
            t.view(self._heads, values)[mine].float() for t in (self.A_log, self.dt_bias)
        )
        given = (
            query,
            key,
            value.view(len(value), count, values, self._value_size),
            -rates.exp() * F.softplus(decay.float() + bias),
            strength.sigmoid(),
        )
        if has_kernel(query):
            return delta_rule_on_gpu(*given, layout.wide_bounds).flatten(2)
        return gated_delta_rule(*given, layout.chunks).flatten(2)

    @override
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weights in Megatron's form of a checkpoint."""
        own = {
            name: value
            for name, value in (*self.named_parameters(), *self.named_buffers())
            if not name.endswith("proj.weight")
        }
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, _DIVIDED, sharded_offsets
        )
        for name in ("in_proj", "out_proj"):
            state |= getattr(self, name).sharded_state_dict(
                f"{prefix}{name}.", sharded_offsets, metadata
            )
        return state
