"""Which tensors are published in fp8, what that saves, and which models cannot be."""

import msgspec
import pytest

from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.fp8 import (
    bytes_per_parameter,
    is_quantized,
    quantization_trouble,
    quantized,
)
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.models.vision_config import VisionConfig

MIXTURE = load_hf_config(shape_folder("Qwen3-30B-A3B"))
TOWER = VisionConfig(
    depth=2, hidden_size=32, intermediate_size=48, patch_size=14, out_hidden_size=64
)
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "bias")


def specs(hf: HfConfig) -> list[TensorSpec]:
    return [
        TensorSpec(tensor.name, "bfloat16", tensor.whole_shape(hf.sizes))
        for _, parameter in hf.parameters()
        for tensor in parameter.tensors
    ]


def test_matrices_of_layers_and_no_others_are_quantized():
    names = [spec.name for spec in specs(MIXTURE)]
    kept = [name for name in names if not is_quantized(name)]
    assert kept == [name for name in names if any(part in name for part in KEPT)]
    mixtral = "model.layers.3.block_sparse_moe."
    assert is_quantized(f"{mixtral}experts.7.w2.weight")
    assert not is_quantized(f"{mixtral}gate.weight")
    assert not is_quantized("model.layers.3.self_attn.q_proj.bias")


def test_a_version_of_a_mixture_has_half_of_the_bytes():
    wide = specs(MIXTURE)
    narrow = list(quantized(wide))
    saved = sum(s.num_bytes for s in narrow) / sum(s.num_bytes for s in wide)
    assert 0.5 < saved < 0.52
    each = bytes_per_parameter(MIXTURE, is_fp8=True)
    assert each * MIXTURE.num_parameters == pytest.approx(sum(s.num_bytes for s in narrow))
    assert bytes_per_parameter(MIXTURE, is_fp8=False) == 2
    by_name = {spec.name: spec for spec in narrow}
    down = "model.layers.0.mlp.experts.5.down_proj.weight"
    assert by_name[down] == TensorSpec(down, "float8_e4m3fn", (2048, 768))
    assert by_name[f"{down}_scale_inv"] == TensorSpec(f"{down}_scale_inv", "float32", (16, 6))


def test_what_cannot_be_in_fp8_is_named_with_both_sides_and_the_setting():
    def trouble(hf: HfConfig, attention: int = 1, experts: int = 1) -> str:
        ranks = ("learner.tensor_parallel", attention)
        of_experts = ("learner.expert_tensor_parallel", experts)
        return quantization_trouble(hf, attention=ranks, inner=ranks, experts=of_experts)

    assert trouble(MIXTURE) == trouble(MIXTURE, 4, 6) == ""
    assert trouble(MIXTURE, 8) == (
        'weightbus.precision = "fp8" needs whole blocks of 128 on every rank: num_key_value_heads '
        "x head_dim of run.model must be a multiple of 1024 with learner.tensor_parallel = 8, "
        "got 512"
    )
    assert trouble(MIXTURE, 1, 4).endswith(
        "moe_intermediate_size of run.model must be a multiple of 512 with "
        "learner.expert_tensor_parallel = 4, got 768"
    )
    narrow = msgspec.structs.replace(MIXTURE, hidden_size=2000)
    assert trouble(narrow, 4).endswith(
        "hidden_size of run.model must be a multiple of 128, got 2000"
    )
    assert 'expected "trained"' in trouble(load_hf_config(shape_folder("DeepSeek-V3")))
    assert trouble(load_hf_config(shape_folder("Qwen3.5-4B"))).endswith(
        "linear attention have fewer rows than a block of fp8, 64"
    )
    seeing = msgspec.structs.replace(MIXTURE, vision=TOWER)
    assert trouble(seeing).endswith("an engine would begin with a made-up vision tower")
    assert trouble(load_hf_config(shape_folder("gpt-oss-20b"))).startswith(
        'weightbus.precision = "fp8" for gpt_oss: expected "trained", as the experts of a layer'
    )
