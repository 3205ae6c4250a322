"""What a learner's rank holds, counted by hand and by invariants."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.algos.logprobs import linear_logprobs
from slipstream.algos.section import AlgoSection
from slipstream.deploy.predict.memory import learner_rank as memory
from slipstream.deploy.predict.memory.gpu import learner_memory
from slipstream.deploy.predict.memory.learner_rank import (
    TENSORS,
    RankParameters,
    adapter_parameters,
    learner_stages,
    passes_in_flight,
    rank_parameters,
    total_bytes,
)
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.parallel import ParallelSizes
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import RunSection
from tests.support.planned import shape_of
from tests.support.shelf import SHELF

# hidden 8, 4 query heads and 2 key heads of 2 channels, inner 12, 11 tokens, 3 layers
SMALL = HfConfig(
    model_type="qwen2",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
NORMS, ATTENTION, BIAS, MLP = 2 * 8, (8 + 4 + 4) * 8 + 8 * 8, 8 + 4 + 4, 3 * 12 * 8
LAYER = NORMS + ATTENTION + BIAS + MLP
MIXTURE = HfConfig(
    model_type="qwen3_moe",
    vocab_size=12,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
)
MIXTURE_ATTENTION, ROUTER, EXPERT = 2 * (16 + 8) * 8, 8 * 8, 3 * 6 * 8
MIXTURE_DENSE = 2 * 8 + MIXTURE_ATTENTION + ROUTER + 2 * 4  # with the norms of queries and keys


def settings(**learner: object) -> LearnerSettings:
    return LearnerSettings(
        run=RunSection(model="."),
        learner=LearnerSection(**learner),  # type: ignore[arg-type]
        algo=AlgoSection(),
        weightbus=WeightBusSection(),
    )


def parts_of(hf: HfConfig, stage: int = 0, *, on_gpu: bool = False, **learner: object):
    (*parts,) = learner_stages(hf, settings(**learner), on_gpu=on_gpu)[stage]
    return {part.what: part.num_bytes for part in parts}


def test_one_rank_has_every_parameter_once():
    assert rank_parameters(SMALL, LearnerSection(), 0) == RankParameters(
        3 * LAYER + 11 * 8 + 8, 0, 2 * 12 * 8
    )
    assert rank_parameters(SMALL, LearnerSection(), 0).count == SMALL.num_parameters
    assert rank_parameters(MIXTURE, LearnerSection(), 0).count == MIXTURE.num_parameters


def test_tensor_parallelism_splits_projections_pads_the_vocabulary_and_copies_norms():
    own = rank_parameters(SMALL, LearnerSection(ranks=2, tensor_parallel=2), 0)
    assert own.count == 3 * (NORMS + (ATTENTION + BIAS + MLP) // 2) + 6 * 8 + 8


def test_the_last_of_several_stages_has_a_copy_of_a_tied_embedding():
    learner = LearnerSection(ranks=2, pipeline_parallel=2)
    first, last = (rank_parameters(SMALL, learner, stage).count for stage in (0, 1))
    assert first == 2 * LAYER + 11 * 8  # of three layers the first of the middle takes two
    assert last == LAYER + 8 + 11 * 8


def test_layers_of_interleaved_chunks_are_those_of_the_ranks_stages():
    learner = LearnerSection(
        ranks=2, pipeline_parallel=2, interleaved_chunks=2, layers_per_stage=(1, 1, 1, 1)
    )
    first, last = (rank_parameters(MIXTURE, learner, stage).dense for stage in (0, 1))
    assert first == 2 * MIXTURE_DENSE + 12 * 8
    assert last == 2 * MIXTURE_DENSE + 8 + 12 * 8


def test_experts_are_divided_by_sizes_of_their_own():
    learner = LearnerSection(
        ranks=8, tensor_parallel=2, expert_parallel=4, expert_tensor_parallel=2
    )
    own = rank_parameters(MIXTURE, learner, 0)
    assert own.expert == 4 * 2 * EXPERT // 2
    norms_and_router = 2 * 8 + ROUTER + 2 * 4
    assert own.dense == 4 * (norms_and_router + MIXTURE_ATTENTION // 2) + 2 * 6 * 8 + 8


def test_a_critic_has_a_value_head_in_place_of_the_output_layer():
    one = rank_parameters(MIXTURE, LearnerSection(), 0, is_critic=True)
    assert one.count == MIXTURE.num_parameters - 12 * 8 + 8 + 1
    learner = LearnerSection(ranks=2, pipeline_parallel=2)
    last = rank_parameters(SMALL, learner, 1, is_critic=True)
    assert last.count == LAYER + 8 + 8 + 1


def test_bytes_of_weights_gradients_and_optimizer():
    count = SMALL.num_parameters
    exact = parts_of(SMALL)
    assert [exact[kind] for kind in TENSORS] == [4 * count, 4 * count, 0, 8 * count]
    narrow = parts_of(SMALL, on_gpu=True)
    assert [narrow[kind] for kind in TENSORS] == [2 * count, 4 * count, 4 * count, 8 * count]


def test_an_optimizer_is_divided_over_replicas_and_context_and_experts_by_their_own():
    dense = rank_parameters(SMALL, LearnerSection(), 0).count
    divided = parts_of(SMALL, ranks=4, context_parallel=2)
    assert divided["moments"] == 8 * -(-dense // 4)
    own = rank_parameters(MIXTURE, LearnerSection(ranks=4, expert_parallel=2), 0)
    divided = parts_of(MIXTURE, ranks=4, expert_parallel=2)
    assert divided["moments"] == 8 * (-(-own.dense // 4) + own.expert // 2)


def test_moments_in_bfloat16_and_a_share_on_the_host_are_less_of_the_optimizer():
    count = SMALL.num_parameters
    assert parts_of(SMALL, moments_dtype="bfloat16")["moments"] == 4 * count
    narrow = parts_of(SMALL, on_gpu=True, moments_dtype="bfloat16")
    assert (narrow["main weights"], narrow["moments"]) == (4 * count, 4 * count)
    divided = {"optimizer_offload_fraction": 0.75}
    a_quarter = parts_of(SMALL, on_gpu=True, **divided)
    assert (a_quarter["main weights"], a_quarter["moments"]) == (count, 2 * count)
    nothing = parts_of(SMALL, on_gpu=True, optimizer_offload_fraction=1)
    assert nothing["main weights"] == nothing["moments"] == 0
    # On a CPU the host is the device: weights, moments and gradients in float32.
    assert parts_of(SMALL, **divided)["optimizer on the host"] == 12 * count


def test_what_is_offloaded_counts_in_the_moment_that_uses_it():
    frozen, everything = [MIXTURE], ("weights", "gradients", "optimizer")

    def total(offload: tuple[str, ...], tokens: int, kl: dict[str, object] | None = None) -> float:
        given = settings(offload=offload, max_tokens_per_microbatch=tokens)
        given = msgspec.structs.replace(given, algo=AlgoSection(kl=kl or {}))
        (parts,) = learner_stages(SMALL, given, on_gpu=True, frozen=frozen, has_critic=True)
        return total_bytes(parts)

    count = SMALL.num_parameters
    critic = rank_parameters(SMALL, LearnerSection(), 0, is_critic=True).count
    reference = 2 * MIXTURE.num_parameters
    relay = 4 * settings().weightbus.bucket_bytes
    # Few tokens: the moment of the critic's update, or the pass of a large frozen model.
    few = total(everything, 1) - relay
    assert few == max((2 + 4 + 12) * max(count, critic), reference)
    # Many tokens: the training pass; the optimizer's state is away.
    working = total((), 4000) - relay - 18 * (count + critic) - reference
    assert total(everything, 4000) - relay == working + 6 * max(count, critic)
    assert total(("optimizer",), 4000) - relay == working + 6 * (count + critic) + reference
    assert total(("weights",), 4000) - relay == working + 16 * (count + critic) + 2 * max(
        count, critic
    )
    # A KL over the whole vocabulary is taken with the weights of both, and the logits of both.
    full = total(everything, 4000, {"name": "full", "coefficient": 0.1}) - relay
    assert full == working + 6 * count + reference + 4 * 4000 * 11


def test_activations_of_one_rank():
    of_layer = 4 * 8 + 2 * (8 + 4) + 3 * 12
    assert parts_of(SMALL, max_tokens_per_microbatch=10)["activations"] == 4 * 10 * 3 * of_layer
    normed = 4 * 8 + 3 * (16 + 8) + 2 * (8 + 3 * 6)  # and two experts of each token
    assert parts_of(MIXTURE, max_tokens_per_microbatch=10)["activations"] == 4 * 10 * 4 * normed


def test_gates_and_linear_attention_are_counted_and_the_largest_layer_is_computed_again():
    linear, full = "linear_attention", "full_attention"
    hybrid = HfConfig(
        model_type="qwen3_5_text",
        vocab_size=12,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        layer_types=(linear, full, linear, linear),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
    )
    rest, gated = 4 * 8 + 3 * 12, 3 * (16 + 8) + 4 * 16
    of_linear = 4 * (6 + 20) + 20 + 2 * 4 + 64 * 4
    kept, again = (
        parts_of(hybrid, max_tokens_per_microbatch=10, **learner)["activations"] / 40
        for learner in ({}, {"recompute": "full"})
    )
    assert kept == 4 * rest + gated + 3 * of_linear
    assert again == 4 * 8 + rest + of_linear


def test_activations_are_divided_by_tensor_sequence_and_context_parallelism():
    sizes = {"max_tokens_per_microbatch": 10, "tensor_parallel": 2, "ranks": 2}
    of_layer, split = 4 * 8 + 2 * (8 + 4) + 3 * 12, 2 * (8 + 4) + 3 * 12
    assert parts_of(SMALL, **sizes)["activations"] == 4 * 10 * 3 * of_layer / 2
    whole = parts_of(SMALL, sequence_parallel=False, **sizes)["activations"]
    assert whole == 4 * 10 * 3 * (4 * 8 + split / 2)
    context = parts_of(SMALL, max_tokens_per_microbatch=10, ranks=2, context_parallel=2)
    assert context["activations"] == 4 * 5 * 3 * of_layer


def test_recomputed_activations_are_there_of_one_layer_at_a_time():
    of_layer, mlp = 4 * 8 + 2 * (8 + 4) + 3 * 12, 3 * 12

    def bytes_of(**learner: object) -> float:
        return parts_of(SMALL, max_tokens_per_microbatch=10, **learner)["activations"] / 40

    assert bytes_of(recompute="full") == 3 * 8 + of_layer
    assert bytes_of(recompute="full", recompute_layers=2) == 2 * 8 + of_layer + of_layer
    assert bytes_of(recompute="selective") == 3 * of_layer  # flash attention keeps nothing
    modules = ("core_attn", "mlp")
    assert bytes_of(recompute="selective", recompute_modules=modules) == 3 * (of_layer - mlp) + mlp


def test_passes_in_flight_of_one_forward_one_backward():
    four = ParallelSizes(pipeline=4)
    assert [passes_in_flight(four, stage) for stage in range(4)] == [4, 3, 2, 1]
    # Two chunks: 2 (4 - 0 - 1) + 4 forward passes of half of the layers, and the first of 1F1B.
    assert passes_in_flight(ParallelSizes(pipeline=4, chunks=2), 0) == 11 / 2


def test_the_output_layer_takes_memory_on_the_last_stage_and_the_relay_on_the_first():
    first, last = (
        parts_of(SMALL, stage, on_gpu=True, ranks=2, pipeline_parallel=2) for stage in (0, 1)
    )
    assert (first["logits"], first["last hidden states"], last["weight relay"]) == (0, 0, 0)
    assert last["logits"] == (4 + 2) * 8192 * 11
    assert last["last hidden states"] == 8 * 8192 * 8
    assert first["weight relay"] == 4 * WeightBusSection().bucket_bytes


def test_a_gradient_is_made_where_it_is_not_added_to_its_total_as_it_is_computed():
    assert parts_of(SMALL)["one gradient"] == 0
    unfused = {"gradient_accumulation_fusion": False}
    assert parts_of(SMALL, on_gpu=True, megatron=unfused)["one gradient"] == 2 * 2 * 12 * 8
    adapted = msgspec.structs.replace(settings(), lora=LoraSection(rank=2))
    ((*parts,),) = learner_stages(SMALL, adapted, on_gpu=False)
    assert {part.what: part.num_bytes for part in parts}["one gradient"] == 4 * 2 * 12


def test_the_gradient_of_a_rank_s_experts_is_made_before_it_is_added():
    hf = shape_of("Qwen3-30B-A3B")

    def gradient(**learner: object) -> float:
        return parts_of(hf, on_gpu=True, **learner)["one gradient"]

    assert gradient(ranks=8, expert_parallel=8) == 2 * 16 * 2 * 768 * 2048
    parts = {"expert_parallel": 4, "expert_tensor_parallel": 2, "tensor_parallel": 2}
    assert gradient(ranks=8, **parts) == 2 * 32 * 768 * 2048


def test_the_estimate_knows_the_chunks_that_logits_are_computed_in():
    for name in ("CHUNK_BYTES", "CUDA_CHUNK_BYTES", "MIN_CHUNK_COLUMNS", "KEPT_BYTES"):
        assert getattr(memory, name) == getattr(linear_logprobs, name)


def test_logits_that_fit_are_kept_whole_and_others_are_there_a_chunk_at_a_time():
    tokens, large = 1000, msgspec.structs.replace(SMALL, vocab_size=150_000)

    def logits(vocab_size: int) -> float:
        hf = msgspec.structs.replace(SMALL, vocab_size=vocab_size)
        return parts_of(hf, max_tokens_per_microbatch=tokens)["logits"]

    assert logits(130_000) == 4 * tokens * 130_000
    assert logits(150_000) == 4 * tokens * (memory.CHUNK_BYTES // (4 * tokens))
    on_gpu = parts_of(large, on_gpu=True, max_tokens_per_microbatch=tokens)["logits"]
    assert on_gpu == (4 + 2) * tokens * (memory.CUDA_CHUNK_BYTES // (4 * tokens))


def test_the_stage_that_needs_most_is_the_worst():
    given, others = settings(ranks=2, pipeline_parallel=2), {"frozen": [SMALL], "has_critic": True}
    sums = [total_bytes(parts) for parts in learner_stages(SMALL, given, on_gpu=True, **others)]
    assert total_bytes(learner_memory(SMALL, given, **others)) == max(sums) != min(sums)


POWERS = st.sampled_from([1, 2, 4])


@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=POWERS,
    expert=POWERS,
    expert_tensor=st.sampled_from([1, 2]),
    vocabulary=st.integers(1, 99),
)
def test_the_ranks_of_a_replica_hold_the_model_once_but_for_what_is_copied(
    tensor: int, pipeline: int, expert: int, expert_tensor: int, vocabulary: int
):
    hf = msgspec.structs.replace(MIXTURE, vocab_size=vocabulary)
    learner = LearnerSection(
        ranks=tensor * pipeline * expert * expert_tensor,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
    )
    stages = [rank_parameters(hf, learner, stage) for stage in range(pipeline)]
    held = sum(tensor * one.dense + expert * expert_tensor * one.expert for one in stages)
    copied = 4 * (2 * 8 + ROUTER + 2 * 4) + 8  # norms and routers, of each tensor-parallel rank
    padding = 2 * (-vocabulary % tensor) * 8  # of the embedding and of the output layer
    assert held == hf.num_parameters + (tensor - 1) * copied + padding


def test_settings_that_do_not_divide_the_layers_are_refused():
    with pytest.raises(Exception, match=r"layers_per_stage adds up to 5 layers"):
        learner_stages(
            SMALL, settings(ranks=2, pipeline_parallel=2, layers_per_stage=(3, 2)), on_gpu=False
        )


def test_adapters_alone_have_gradients_and_an_optimizer():
    lora = LoraSection(rank=2, targets=("q_proj", "o_proj", "down_proj"))
    count = 3 * 2 * ((8 + 8) + (8 + 8) + (12 + 8))
    for ranks in (1, 2):
        given = msgspec.structs.replace(settings(ranks=ranks, tensor_parallel=ranks), lora=lora)
        (parts,) = learner_stages(SMALL, given, on_gpu=False)
        sizes = {part.what: part.num_bytes for part in parts}
        # B of q_proj is split by rows, A of o_proj and of down_proj by columns.
        mine = count if ranks == 1 else 3 * 2 * ((8 + 4) + (4 + 8) + (6 + 8))
        own = rank_parameters(SMALL, given.learner, 0).count
        assert sizes["weights"] == 4 * (own + mine)
        assert sizes["gradients"] == 4 * mine
        assert sizes["moments"] == 8 * mine


@pytest.mark.parametrize(
    ("parts", "tensor", "experts", "divided"),
    [
        ({}, 1, 128, 1),
        ({"expert_parallel": 8}, 1, 16, 1),
        ({"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 2}, 2, 32, 2),
    ],
)
def test_a_rank_has_adapters_of_its_own_experts(
    parts: dict[str, object], tensor: int, experts: int, divided: int
):
    hf, rank = shape_of("Qwen3-30B-A3B"), 8
    facts = LoraSection(rank=rank, targets=("q_proj", "gate_proj", "down_proj")).facts()
    found = adapter_parameters(hf, settings(ranks=8, **parts).learner, facts, 0)
    hidden, inner, queries = 2048, 768, 4096
    assert found.dense == 48 * rank * (hidden + queries // tensor)
    assert found.expert == 48 * experts * rank * 2 * (hidden + inner // divided)
    assert found.largest == max(experts * rank * hidden, rank * queries // tensor)


def test_the_first_stage_has_the_tower_and_what_it_keeps(tmp_path: Path):
    """Frozen it is weights alone, of every model; trained it is as other weights are."""
    (tmp_path / "config.json").write_text(json.dumps(SHELF["Qwen/Qwen3-VL-2B-Instruct"].config))
    hf, two = load_hf_config(tmp_path), {"ranks": 2, "pipeline_parallel": 2}
    trained = replace(hf, trains_vision=True)
    tower = hf.num_tower_parameters
    first, last = (parts_of(hf, stage, on_gpu=True, **two) for stage in range(2))
    assert first["frozen towers"] == 2 * tower
    assert "frozen towers" not in last
    seen, unseen = (parts_of(trained, stage, on_gpu=True, **two) for stage in range(2))
    assert "frozen towers" not in seen
    assert seen["weights"] - first["weights"] == 2 * tower
    assert seen["gradients"] - first["gradients"] == 4 * tower
    assert unseen == last
    patches, block = 4 * 8192, 8 * 1024 + 2 * 4096
    assert first["vision activations"] == patches * (2 * block + 4 * 1536)
    assert seen["vision activations"] == patches * (2 * (2 * 24 + 1) * block + 4 * 1536)
    again = parts_of(trained, on_gpu=True, recompute="full", **two)
    kept = 2 * (2 * 24 * 1024 + block)
    assert again["vision activations"] == patches * (kept + 4 * 1536)
