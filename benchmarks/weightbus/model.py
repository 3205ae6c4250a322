"""The tensors that are published: shapes of SmolLM2-135M, and of a Llama of 1B parameters."""

from dataclasses import dataclass

import torch

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import WeightSnapshot, tensor_views
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

MIB = 1024 * 1024
BUCKET_BYTES = WeightBusSection().bucket_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Llama with a tied output layer."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    vocabulary: int

    def specs(self, dtype: str = "bfloat16") -> list[TensorSpec]:
        """Return its tensors, without digests."""
        head = self.hidden // self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden)
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "self_attn.q_proj.weight": (self.heads * head, self.hidden),
                prefix + "self_attn.k_proj.weight": (self.groups * head, self.hidden),
                prefix + "self_attn.v_proj.weight": (self.groups * head, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, self.heads * head),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "mlp.gate_proj.weight": (self.inner, self.hidden),
                prefix + "mlp.up_proj.weight": (self.inner, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.inner),
            }
        shapes["model.norm.weight"] = (self.hidden,)
        return [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]

    def config(self) -> dict[str, int]:
        """Return its entries of a config.json."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.hidden // self.heads,
        }

    def layout(self, bucket_bytes: int = BUCKET_BYTES, dtype: str = "bfloat16") -> WeightManifest:
        return plan_layout(self.specs(dtype), bucket_bytes=bucket_bytes)


SMOLLM2 = Sizes(layers=30, hidden=576, inner=1536, heads=9, groups=3, vocabulary=49152)
ONE_BILLION = Sizes(layers=16, hidden=2048, inner=8192, heads=32, groups=8, vocabulary=32768)
TINY = Sizes(layers=2, hidden=32, inner=64, heads=2, groups=1, vocabulary=64)
QUICK = Sizes(layers=8, hidden=576, inner=1536, heads=9, groups=3, vocabulary=8192)


def written_slots(sizes: Sizes, dtype: str = "bfloat16", *, slots: int = NUM_SLOTS) -> SharedSlots:
    """Return a learner's memory whose slots hold random versions."""
    layout = sizes.layout(dtype=dtype)
    memory = SharedSlots.make(layout, num_slots=slots)
    for slot in range(slots):
        for view in tensor_views(layout, memory.slot(slot)).values():
            view.normal_(std=0.02)
    return memory


def snapshot_of(
    sizes: Sizes, memory: SharedSlots, *, bucket_bytes: int, step: int
) -> WeightSnapshot:
    return WeightSnapshot(PolicyVersion(1, step), sizes.layout(bucket_bytes), memory.slot(0))


def random_tensors(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return tensors of their own, small and finite."""
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)).normal_(std=0.02)
        for spec in specs
    }
