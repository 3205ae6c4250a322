"""Adapters of experts and of latent attention on a CPU, for SGLang 0.5.23.

SGLang computes both by Triton alone. Each function corrects one module right after its import
(``patches.install``); remove them when SGLang's backend ``torch_native`` has these adapters.

Shapes: T tokens, k experts of a token, H hidden size, I inner channels of an expert on this rank; r
rank, L places of adapters in the pool; h heads of this rank, n channels of a key that do not turn,
v of a value, c of what both are expanded from.
"""

import importlib
from types import ModuleType
from typing import Any

from slipstream.generators.sglang.replacing import replace

LAYERS = "sglang.srt.lora.layers"
# Attributes of a layer of experts that SGLang's models read of what is around it, too.
_OF_LAYER = (
    "quant_method",
    "moe_runner_config",
    "dispatcher",
    "num_local_experts",
    "should_fuse_routed_scaling_factor_in_topk",
    "intermediate_size_per_partition",
)
LATENT = "sglang.srt.lora.deepseek_mla_correction"


def add_to_experts(module: ModuleType) -> None:
    """Add adapters to the products of experts, without the runner of Triton's kernels."""
    import torch  # in the process that computes, not in the agent's
    import torch.nn.functional as F  # noqa: N812 - the usual name

    layer = module.FusedMoEWithLoRA
    prepare, compute = layer.__init__, layer.forward

    def prepared(self: Any, base_layer: Any, lora_backend: Any, **options: Any) -> None:  # noqa: ANN401
        if base_layer.w13_weight.is_cuda:
            prepare(self, base_layer, lora_backend, **options)
            return
        module.BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
        for name in _OF_LAYER:
            setattr(self, name, getattr(base_layer, name))
        self.tp_size, self.tp_rank = base_layer.moe_tp_size, base_layer.moe_tp_rank
        self._uses_interleaved_gate_up = False

    def forward(
        self: Any,  # noqa: ANN401
        hidden_states: torch.Tensor,
        topk_output: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        base, batch = self.base_layer, self.lora_backend.batch_info
        if base.w13_weight.is_cuda:
            return compute(self, hidden_states, topk_output, **named)
        if batch is None:
            return base.forward(hidden_states, topk_output, **named)
        sent = base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        output = outputs(self, sent.hidden_states, sent.topk_output, _places_of_tokens(batch))
        combined = importlib.import_module("sglang.srt.layers.moe.token_dispatcher")
        return base.dispatcher.combine(
            combine_input=combined.StandardCombineInput(hidden_states=output)
        )

    def outputs(
        self: Any,  # noqa: ANN401
        tokens: torch.Tensor,  # [T, H]
        topk_output: Any,  # noqa: ANN401
        places: torch.Tensor,  # [T]
    ) -> torch.Tensor:
        weights, chosen = topk_output[0], topk_output[1].long()  # [T, k] each
        count = len(self.base_layer.w13_weight)
        kinds = places[:, None] * count + chosen
        result = torch.zeros_like(tokens)
        for kind in kinds.unique().tolist():
            of_token, of_choice = (kinds == kind).nonzero(as_tuple=True)
            place, expert = divmod(kind, count)
            rows = tokens[of_token]
            gate, up = F.linear(rows, self.base_layer.w13_weight[expert]).chunk(2, dim=-1)
            of_gate, of_up = self.gate_up_lora_a_weights[place, expert].chunk(2)  # [r, H] each
            from_gate, from_up = self.gate_up_lora_b_weights[place, expert].chunk(2)  # [I, r] each
            gate = gate + rows @ of_gate.T @ from_gate.T  # B has the scale
            up = up + rows @ of_up.T @ from_up.T
            inner = F.silu(gate) * up
            down = F.linear(inner, self.base_layer.w2_weight[expert])
            low = inner @ self.down_lora_a_weights[place, expert].T
            down = down + low @ self.down_lora_b_weights[place, expert].T
            shares = weights[of_token, of_choice].unsqueeze(-1).to(down.dtype)
            result.index_add_(0, of_token, down * shares)
        return result

    replace(layer, "__init__", prepared)
    replace(layer, "forward", forward)


def add_to_latents(module: ModuleType) -> None:
    """Add the adapter of ``kv_b_proj`` to queries and outputs that meet compressed keys."""
    import torch  # in the process that computes

    on_gpu = module.apply_q_correction, module.apply_v_correction

    def factors(attention: Any, heads: int) -> Any:  # noqa: ANN401
        """Return A [T, r, c] and B [T, h, n + v, r] of each token, and the scales [T, 1, 1]."""
        layer = attention.kv_b_proj
        batch = layer.lora_backend.batch_info
        places = _places_of_tokens(batch)
        b = layer.B_buffer[places].unflatten(1, (heads, -1))
        return layer.A_buffer[places], b, batch.scalings[places].view(-1, 1, 1)

    def is_inactive(attention: Any) -> bool:  # noqa: ANN401
        layer = attention.kv_b_proj
        return not hasattr(layer, "A_buffer") or layer.lora_backend.batch_info is None

    def apply_q_correction(
        attn_module: Any,  # noqa: ANN401
        q_nope: torch.Tensor,  # [T, h, n]
        q_nope_out: torch.Tensor,  # [T, h, c]
    ) -> torch.Tensor:
        if q_nope.is_cuda:
            return on_gpu[0](attn_module, q_nope, q_nope_out)  # type: ignore[no-any-return]
        if is_inactive(attn_module):
            return q_nope_out
        a, b, scale = factors(attn_module, q_nope.shape[1])
        of_keys = b[:, :, : attn_module.qk_nope_head_dim]
        low = torch.einsum("thn,thnr->thr", q_nope, of_keys)
        total: torch.Tensor = q_nope_out + (low @ a) * scale
        return total

    def apply_v_correction(
        attn_module: Any,  # noqa: ANN401
        attn_output: torch.Tensor,  # [T, h, c]
        attn_bmm_flat: torch.Tensor,  # [T, h v]
    ) -> torch.Tensor:
        if attn_output.is_cuda:
            return on_gpu[1](attn_module, attn_output, attn_bmm_flat)  # type: ignore[no-any-return]
        if is_inactive(attn_module):
            return attn_bmm_flat
        a, b, scale = factors(attn_module, attn_output.shape[1])
        of_values = b[:, :, attn_module.qk_nope_head_dim :]
        low = attn_output @ a.transpose(1, 2)
        added = torch.einsum("thr,thvr->thv", low, of_values) * scale
        total: torch.Tensor = attn_bmm_flat + added.flatten(1)
        return total

    replace(module, "apply_q_correction", apply_q_correction)
    replace(module, "apply_v_correction", apply_v_correction)


def _places_of_tokens(batch: Any) -> Any:  # noqa: ANN401
    """Return the place in the pool of each token's adapter, [T] int64."""
    count = batch.num_segments
    places = batch.weight_indices_cpu.long()
    return places.repeat_interleave(batch.seg_lens_cpu[:count].long())
