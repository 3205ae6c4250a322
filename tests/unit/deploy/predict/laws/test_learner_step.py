"""The seconds of a learner step, counted by hand."""

import pytest

from slipstream.deploy.predict.laws.figure import total
from slipstream.deploy.predict.laws.learner_step import Work, step_figures
from slipstream.learner.config import LearnerSettings
from slipstream.wire.models.flops import SequenceCost
from tests.support.planned import H100, config_of, shape_of

QWEN = shape_of("Qwen3-30B-A3B")
WORK = Work(trajectories=256, mean_tokens=2000)
FLOPS = 256 * SequenceCost.of(QWEN).flops(2000)


def settings(**learner: object) -> LearnerSettings:
    return config_of("Qwen3-30B-A3B", learner=learner).learner


def seconds(work: Work = WORK, **learner: object) -> dict[str, float]:
    return {one.what: one.value for one in step_figures(QWEN, settings(**learner), work, H100)}


def test_compute_is_flops_over_a_share_of_the_peak():
    found = seconds(ranks=8)
    assert found["compute"] == pytest.approx(FLOPS / (8 * 0.4 * 989e12))
    assert {"bubbles", "tensor parallelism", "expert parallelism"}.isdisjoint(found)


def test_tokens_of_prompts_do_not_meet_the_output_layer():
    work = Work(trajectories=256, mean_tokens=2000, mean_prompt=500)
    saved = 256 * 500 * 6 * QWEN.hidden_size * QWEN.vocab_size
    assert seconds(work, ranks=8)["compute"] == pytest.approx((FLOPS - saved) / (8 * 0.4 * 989e12))


def test_recomputing_all_layers_is_another_forward_pass():
    full = seconds(ranks=8, recompute="full")["compute"]
    assert full == pytest.approx(4 / 3 * seconds(ranks=8)["compute"])
    half = seconds(ranks=8, recompute="full", recompute_layers=24)["compute"]
    assert half == pytest.approx(7 / 6 * seconds(ranks=8)["compute"])
    experts = seconds(ranks=8, recompute="selective", recompute_modules=("moe",))["compute"]
    assert seconds(ranks=8)["compute"] < experts < full


def test_updates_after_the_first_need_a_forward_pass_and_so_does_each_frozen_policy():
    once = seconds(ranks=8)["compute"]
    assert seconds(ranks=8, minibatches=2)["compute"] == pytest.approx(4 / 3 * once)
    both = Work(trajectories=256, mean_tokens=2000, frozen=1, has_critic=True)
    assert seconds(both, ranks=8)["compute"] == pytest.approx((2 + 1 / 3) * once)


def test_passes_without_a_backward_pass_compute_nothing_again():
    work = Work(trajectories=256, mean_tokens=2000, frozen=3)
    plain = seconds(work, ranks=2, tensor_parallel=2)
    full = seconds(work, ranks=2, tensor_parallel=2, recompute="full")
    assert plain["compute"] == pytest.approx(2 * seconds(ranks=2, tensor_parallel=2)["compute"])
    assert full["compute"] == pytest.approx(plain["compute"] * (1 + 1 / 3 + 1) / 2)
    # Forward, backward, three forward passes alone; and one more of the layers computed again.
    assert full["tensor parallelism"] == pytest.approx(plain["tensor parallelism"] * 6 / 5)


def test_bubbles_are_p_minus_1_of_m_microbatches():
    found = seconds(ranks=8, pipeline_parallel=4, max_tokens_per_microbatch=8000)
    # 512,000 tokens on two replicas are 32 microbatches of 8,000 each.
    assert found["bubbles"] == pytest.approx(found["compute"] * 3 / 32)
    share = found["bubbles"] / (found["bubbles"] + found["compute"])
    assert share == pytest.approx(3 / (32 + 3))
    chunks = seconds(
        ranks=8, pipeline_parallel=4, interleaved_chunks=2, max_tokens_per_microbatch=8000
    )
    assert chunks["bubbles"] == pytest.approx(found["bubbles"] / 2)


def test_a_stage_with_more_layers_than_others_makes_them_wait():
    even = seconds(ranks=8, pipeline_parallel=2)["compute"]
    uneven = seconds(ranks=8, pipeline_parallel=2, layers_per_stage=(20, 28))["compute"]
    assert uneven == pytest.approx(even * 28 / 24)


def test_tensor_parallelism_sends_activations_over_nvlink():
    found = seconds(ranks=2, tensor_parallel=2)
    # Eight gathers and scatters of 2 bytes, of half of them, of 512,000 tokens in 48 layers.
    expected = 8 * 2 * 2048 * 512_000 * 48 / 2 / 450e9
    assert found["tensor parallelism"] == pytest.approx(expected)


def test_tokens_go_to_every_part_of_a_divided_expert():
    whole = seconds(ranks=8, expert_parallel=8)["expert parallelism"]
    parts = seconds(ranks=8, expert_parallel=4, expert_tensor_parallel=2)["expert parallelism"]
    assert parts == pytest.approx(2 * whole)


def test_experts_on_several_hosts_send_tokens_over_nics():
    near = seconds(ranks=8, expert_parallel=8)["expert parallelism"]
    # Dispatch and combine, forward and backward, of 8 copies of 64,000 tokens in 48 layers.
    assert near == pytest.approx(4 * 2 * 2048 * 8 * 64_000 * 48 * 7 / 8 / 450e9)
    far = seconds(ranks=16, ranks_per_node=8, expert_parallel=16)["expert parallelism"]
    sent = 4 * 2 * 2048 * 8 * 32_000 * 48 * 15 / 16
    assert far == pytest.approx(sent * (0.5 / 450e9 + 0.5 / 50e9))


def test_an_optimizer_on_the_host_takes_its_memory_and_pcie():
    on_gpu = seconds(ranks=8, expert_parallel=8)["updates"]
    on_host = seconds(ranks=8, expert_parallel=8, optimizer_offload_fraction=1.0)["updates"]
    assert on_gpu < on_host
    mine = QWEN.num_parameters / 8
    assert on_gpu == pytest.approx(30 * mine / 3.35e12, rel=0.01)
    assert on_host == pytest.approx(mine * (28 * 8 / 300e9 + 6 / 50e9), rel=0.01)


def test_each_part_has_its_law_and_they_add_up():
    figures = step_figures(QWEN, settings(ranks=8, tensor_parallel=2), WORK, H100)
    assert all(one.formula and one.unit == "s" for one in figures)
    assert total(figures) == sum(one.value for one in figures)


def test_ranks_that_share_heads_send_keys_from_ring_to_ring():
    two = {"tensor_parallel": 4, "sequence_parallel": True}  # eight heads and one key of a rank
    sizes, layers = QWEN.sizes, QWEN.num_hidden_layers
    (queries, keys, outputs) = (sizes[name] / 4 for name in ("queries", "keys", "outputs"))
    one = seconds(ranks=64, context_parallel=16, max_tokens_per_microbatch=32768, **two)
    tokens = WORK.tokens / 16
    # Eight shares of heads, each with a copy of the key, and two rings.
    channels = queries + 2 * 8 * keys + outputs
    exchanged = 2 * 2 * channels * tokens * layers * 7 / 8
    assert one["heads for tokens"] == pytest.approx(H100.exchange_s(exchanged, 64))
    sent = 3 * 2 * 2 * 8 * keys * tokens * 2 * layers * 2000 / 32768
    assert one["keys between rings"] == pytest.approx(H100.exchange_s(sent, 64))
    long = Work(trajectories=16, mean_tokens=32000)
    whole = seconds(long, ranks=64, context_parallel=16, max_tokens_per_microbatch=32768, **two)
    share = whole["keys between rings"] / one["keys between rings"] * 2000 / 32768
    assert share == pytest.approx(0.75 / 2), "of one sequence that is on both"
    assert "keys between rings" not in seconds(ranks=32, context_parallel=8, **two)
    again = seconds(
        ranks=64, context_parallel=16, max_tokens_per_microbatch=32768, recompute="full", **two
    )
    assert again["keys between rings"] == pytest.approx(4 / 3 * one["keys between rings"])
