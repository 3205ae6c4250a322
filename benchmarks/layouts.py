"""Which layout for which model: the planned memory of the rank that needs most.

docs/parallelism.md has this table. Nothing is measured here: `slipstream plan --measure` does so
on a CPU, and tests compare it with the plan.

    python -m benchmarks.layouts
"""

import sys
from typing import Any, NamedTuple

from slipstream.algos.section import AlgoSection
from slipstream.deploy.predict.memory.gpu import GIB
from slipstream.deploy.predict.memory.learner_rank import learner_stages, total_bytes
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model.division import refuse_layout
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.settings.sections import RunSection

TOKENS = 16_384
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
MODELS = {
    "Qwen3-1.7B": HfConfig(
        **_QWEN3,
        hidden_size=2_048,
        intermediate_size=6_144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": HfConfig(
        **_QWEN3,
        hidden_size=4_096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Qwen3-32B": HfConfig(
        **_QWEN3,
        hidden_size=5_120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen2.5-72B": HfConfig(
        model_type="qwen2",
        vocab_size=152_064,
        hidden_size=8_192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen3-30B-A3B": HfConfig(
        **_QWEN3_MOE,
        hidden_size=2_048,
        intermediate_size=6_144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "Qwen3-235B-A22B": HfConfig(
        **_QWEN3_MOE,
        hidden_size=4_096,
        intermediate_size=12_288,
        moe_intermediate_size=1_536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
    ),
}


class Row(NamedTuple):
    """A model on so many GPUs, with these settings beside those of all rows."""

    model: str
    gpus: int
    learner: dict[str, Any]
    tokens: int = TOKENS


OF_ALL: dict[str, Any] = {"recompute": "full"}
ROWS = (
    Row("Qwen3-1.7B", 1, {}),
    Row("Qwen3-8B", 2, {"tensor_parallel": 2, "optimizer_offload_fraction": 1.0}),
    Row("Qwen3-8B", 8, {}),
    Row("Qwen3-8B", 8, {"tensor_parallel": 2}),
    Row("Qwen3-8B", 8, {"tensor_parallel": 2, "context_parallel": 4}, 65_536),
    Row("Qwen3-32B", 8, {"tensor_parallel": 8, "moments_dtype": "bfloat16"}),
    Row("Qwen3-32B", 16, {"tensor_parallel": 8}),
    Row("Qwen3-32B", 16, {"tensor_parallel": 4, "pipeline_parallel": 2}),
    Row(
        "Qwen2.5-72B",
        16,
        {"tensor_parallel": 8, "pipeline_parallel": 2, "optimizer_offload_fraction": 0.5},
    ),
    Row("Qwen2.5-72B", 32, {"tensor_parallel": 8, "pipeline_parallel": 4}),
    Row("Qwen3-30B-A3B", 8, {"tensor_parallel": 4, "expert_parallel": 8}),
    Row("Qwen3-30B-A3B", 16, {"tensor_parallel": 2, "expert_parallel": 8}),
    Row(
        "Qwen3-235B-A22B", 64, {"tensor_parallel": 4, "pipeline_parallel": 8, "expert_parallel": 8}
    ),
    Row(
        "Qwen3-235B-A22B", 128, {"tensor_parallel": 4, "pipeline_parallel": 8, "expert_parallel": 8}
    ),
)


def planned_gib(row: Row) -> dict[str, float]:
    """Return the GiB of each part of the rank that needs most."""
    hf = MODELS[row.model]
    learner = LearnerSection(
        ranks=row.gpus, max_tokens_per_microbatch=row.tokens, **OF_ALL, **row.learner
    )
    learner.sizes.check(learner.ranks)
    refuse_layout(hf, learner)
    settings = LearnerSettings(
        run=RunSection(model=row.model),
        learner=learner,
        algo=AlgoSection(),
        weightbus=WeightBusSection(),
    )
    parts = max(learner_stages(hf, settings, on_gpu=True), key=total_bytes)
    return {part.what: part.num_bytes / GIB for part in parts} | {
        "in all": total_bytes(parts) / GIB
    }


def markdown() -> str:
    """Return the table."""
    lines = [
        "| Model | GPUs | `learner.` settings | Tokens | Weights, gradients | Optimizer "
        "| Activations | In all, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        gib = planned_gib(row)
        settings = ", ".join(f"`{name} = {_toml(value)}`" for name, value in row.learner.items())
        kept = gib["weights"] + gib["gradients"]
        working = sum(
            gib[what] for what in ("activations", "logits", "last hidden states", "one gradient")
        )
        lines.append(
            f"| {row.model} | {row.gpus} | {settings or 'none'} | {row.tokens:,} | {kept:.1f} "
            f"| {gib['main weights'] + gib['moments']:.1f} | {working:.1f} | {gib['in all']:.1f} |"
        )
    return "\n".join(lines)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
