import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from slipstream.wire.models.adapters import AdapterFacts
from slipstream.wire.models.flops import (
    ImageCost,
    SequenceCost,
    num_adapter_parameters,
    num_multiplied_parameters,
    peak_tflops_of,
)
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from tests.support.planned import shape_of
from tests.support.shelf import SHELF

QWEN2_5_HALF_B = HfConfig(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def test_every_matrix_counts_once_and_an_embedding_that_is_looked_up_does_not():
    hf = QWEN2_5_HALF_B
    vectors = (
        24 * (896 + 2 * 128 + 2 * 896) + 896
    )  # biases of q, k and v, norms of layers, last norm
    assert num_multiplied_parameters(hf) == hf.num_parameters - vectors == 493_961_216
    untied = msgspec.structs.replace(hf, tie_word_embeddings=False)
    assert num_multiplied_parameters(untied) == 493_961_216
    assert untied.num_parameters > hf.num_parameters


def test_operations_are_those_of_all_products_of_a_sequence_forward_and_backward():
    def product(rows: int, inner: int, columns: int) -> int:
        return 2 * rows * inner * columns

    hf, tokens = QWEN2_5_HALF_B, 4096
    hidden, inner, head = hf.hidden_size, hf.intermediate_size, 64
    projections = (
        product(tokens, hidden, 14 * head)  # queries
        + 2 * product(tokens, hidden, 2 * head)  # keys, values
        + product(tokens, 14 * head, hidden)
        + 2 * product(tokens, hidden, inner)
        + product(tokens, inner, hidden)
    )
    pairs = 14 * (product(tokens, head, tokens) + product(tokens, tokens, head))
    forward = 24 * (projections + pairs / 2) + product(tokens, hidden, hf.vocab_size)
    assert SequenceCost.of(hf).flops(tokens) == pytest.approx(3 * forward, rel=1e-12)


def test_linear_attention_costs_the_same_for_every_token():
    hf = shape_of("Qwen3.5-4B")
    cost, tokens = SequenceCost.of(hf), 4096
    pairs = 16 * 2 * (2 * tokens * 256 * tokens)
    assert cost.quadratic * tokens**2 == pytest.approx(3 * 8 * pairs / 2)
    # A head of values reads its state twice, [128, 128], and adds a product of two vectors.
    states = 24 * 32 * 3 * (2 * 128 * 128)
    assert cost.linear == pytest.approx(6 * num_multiplied_parameters(hf) + 3 * states)


def test_frozen_weights_have_no_gradient_of_their_own():
    hf = QWEN2_5_HALF_B
    adapters = AdapterFacts(rank=8, alpha=16.0, targets=("down_proj", "q_proj"))
    ours = 24 * 8 * ((896 + 896) + (4864 + 896))
    assert num_adapter_parameters(hf, adapters) == ours
    cost, whole = SequenceCost.of(hf, adapters), SequenceCost.of(hf)
    assert cost.linear == 4 * num_multiplied_parameters(hf) + 6 * ours
    assert cost.quadratic == whole.quadratic, "queries, keys and values have gradients"


def test_a_token_meets_the_adapters_of_its_own_experts_alone():
    facts = AdapterFacts(rank=8, alpha=16.0, targets=("down_proj", "q_proj"))
    of_token = 48 * 8 * ((2048 + 32 * 128) + 8 * (768 + 2048))  # 8 of 128 experts
    assert num_adapter_parameters(shape_of("Qwen3-30B-A3B"), facts) == of_token


@pytest.mark.parametrize("adapters", [None, AdapterFacts(rank=8, alpha=16.0, targets=("q_proj",))])
def test_the_output_layer_meets_the_tokens_before_those_that_are_trained(
    adapters: AdapterFacts | None,
):
    cost = SequenceCost.of(QWEN2_5_HALF_B, adapters)
    passes = 3 if adapters is None else 2
    head = passes * 2 * QWEN2_5_HALF_B.hidden_size * QWEN2_5_HALF_B.vocab_size
    whole = cost.flops(300) + cost.flops(200)
    assert cost.flops_within((0, 300, 500), 500) == whole
    assert cost.flops_within((0, 300, 500), 40) == pytest.approx(whole - 460 * head)


def test_a_cost_without_a_model_counts_tokens():
    assert [SequenceCost().flops(length) for length in (1, 10, 32_768)] == [1, 10, 32_768]


def test_the_peak_of_a_gpu_is_found_by_its_name():
    for name, peak in [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ]:
        assert peak_tflops_of(name) == peak


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 5000])
def test_a_token_attends_to_its_window_in_layers_that_have_one(tokens: int):
    hf = shape_of("gpt-oss-20b")  # of 24 layers every second has a window of 128
    cost = SequenceCost.of(hf)
    channels = 64 * 64
    full = tokens * tokens / 2
    seen = min(tokens, 128)
    windowed = seen * seen / 2 + (tokens - seen) * 128
    attention = 3 * 2 * 2 * channels * 12 * (full + windowed)
    linear = 6 * num_multiplied_parameters(hf) * tokens
    assert cost.flops(tokens) == pytest.approx(linear + attention, rel=1e-12)
    assert cost.flops(128) == pytest.approx(
        SequenceCost(cost.linear, 2 * cost.quadratic).flops(128), rel=1e-12
    ), "a window of all tokens changes nothing"


def product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def seeing(folder: Path, name: str, *, trains_vision: bool) -> ImageCost:
    (folder / "config.json").write_text(json.dumps(SHELF[name].config))
    cost = ImageCost.of(replace(load_hf_config(folder), trains_vision=trains_vision))
    assert cost is not None
    return cost


def test_an_image_costs_by_its_patches_and_their_windows(tmp_path: Path):
    """Qwen2.5-VL-7B: 32 blocks, 4 of them without windows of 64 patches."""
    rows, columns, hidden, inner = 16, 24, 1280, 3420
    patches = rows * columns
    block = 4 * product(patches, hidden, hidden) + 3 * product(patches, hidden, inner)
    forward = 32 * block + product(patches, 3 * 2 * 14 * 14, hidden)
    square = 4 * hidden
    forward += product(patches // 4, square, square) + product(patches // 4, square, 3584)
    forward += 4 * 2 * product(patches, hidden, patches) + 28 * 2 * product(patches, hidden, 64)
    frozen = seeing(tmp_path, "Qwen/Qwen2.5-VL-7B-Instruct", trains_vision=False)
    assert frozen.flops(rows, columns) == pytest.approx(forward, rel=1e-12)
    trained = seeing(tmp_path, "Qwen/Qwen2.5-VL-7B-Instruct", trains_vision=True)
    assert trained.flops(rows, columns) == pytest.approx(3 * forward, rel=1e-12)
    assert ImageCost.of(QWEN2_5_HALF_B) is None
