import torch
import xxhash

from slipstream.weightbus.version.adapter_checksums import are_adapters, expected_adapter_checksums
from slipstream.weightbus.version.engine_checksums import EngineLayout

LAYER = "base_model.model.model.layers.0."


def tensors(*targets: str) -> dict[str, torch.Tensor]:
    found = {}
    for seed, target in enumerate(targets):
        generator = torch.Generator().manual_seed(seed)
        for letter, shape in (("A", (2, 5)), ("B", (6, 2))):
            found[f"{LAYER}{target}.lora_{letter}.weight"] = torch.randn(
                *shape, generator=generator
            )
    return found


def checksum(*parts: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(torch.cat(parts).numpy().tobytes())


def test_parts_of_a_fused_layer_are_one_tensor_in_the_engines_order():
    found = tensors("self_attn.v_proj", "self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    found |= tensors("mlp.gate_proj", "mlp.down_proj")
    expected = {}
    for kind in ("lora_A.weight", "lora_B.weight"):
        q, k, v = (found[f"{LAYER}self_attn.{one}_proj.{kind}"] for one in "qkv")
        gate, up = (found[f"{LAYER}mlp.{one}_proj.{kind}"] for one in ("gate", "up"))
        expected[f"{LAYER}self_attn.qkv_proj.{kind}"] = checksum(q, k, v)
        expected[f"{LAYER}mlp.gate_up_proj.{kind}"] = checksum(gate, up)
        down = f"{LAYER}mlp.down_proj.{kind}"
        expected[down] = checksum(found[down])
    assert expected_adapter_checksums(found) == expected


def test_a_part_without_an_adapter_is_zeros():
    found = tensors("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj")
    q, v = (found[f"{LAYER}self_attn.{one}_proj.lora_A.weight"] for one in "qv")
    gate = found[f"{LAYER}mlp.gate_proj.lora_B.weight"]
    sums = expected_adapter_checksums(found)
    qkv = checksum(q, torch.zeros_like(v), v)
    assert sums[f"{LAYER}self_attn.qkv_proj.lora_A.weight"] == qkv
    gate_up = checksum(gate, torch.zeros_like(gate))
    assert sums[f"{LAYER}mlp.gate_up_proj.lora_B.weight"] == gate_up


def test_every_rank_has_whole_adapters_on_its_host_whatever_its_device():
    found = tensors("self_attn.o_proj")
    sums = expected_adapter_checksums(found, EngineLayout("cuda", num_ranks=2))
    name = f"{LAYER}self_attn.o_proj.lora_A.weight"
    assert sums[name] == sums[f"{name} of rank 1"] == checksum(found[name])
    assert len(sums) == 4


def test_versions_are_adapters_or_weights_by_their_names():
    assert are_adapters(tensors("mlp.down_proj"))
    assert not are_adapters(["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
