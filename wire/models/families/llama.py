"""Llama 2 and 3, and the many models of other makers with their architecture."""

from slipstream.wire.models.families.tables import ENDS, GROUPED_ATTENTION, MLP, Family

LLAMA = Family(
    model_type="llama",
    models="Llama 2, 3.x, SmolLM2, TinyLlama",
    config={"attention_bias": False, "rope_interleaved": False},
    layer=GROUPED_ATTENTION,
    mlp=MLP,
    ends=ENDS,
    ignored=frozenset({"is_llama_config"}),
)
