"""The roofline of an engine, counted by hand; what plans and simulations share."""

import pytest

from slipstream.deploy.predict.laws.engine_law import EngineLaw, engine_law
from slipstream.deploy.predict.laws.gpus import gpu_named
from slipstream.deploy.predict.memory.gpu import kv_bytes_per_token, kv_copies, state_bytes
from slipstream.wire.models.flops import num_multiplied_parameters
from tests.support.planned import H100, shape_of

HF = shape_of("Qwen3-30B-A3B")
EXPERTS = 48 * 128 * 3 * 2048 * 768
BASE_S = 0.005


def law_of(ranks: int) -> EngineLaw:
    return engine_law(HF, H100, ranks=ranks)


def test_one_sequence_reads_its_experts_and_many_read_all():
    law = law_of(1)
    dense_s = 2 * (HF.num_parameters - EXPERTS) / (0.6 * 3.35e12)
    experts_s = 2 * EXPERTS / (0.6 * 3.35e12)
    assert law.flat_s(1) - BASE_S == pytest.approx(dense_s + experts_s * 8 / 128)
    assert law.flat_s(1000) - BASE_S == pytest.approx(dense_s + experts_s)


def test_a_step_is_the_longer_of_reading_and_computing_and_reads_what_is_cached():
    law = law_of(1)
    cached = law.step_s(16, 16_000) - law.step_s(16, 0)
    assert cached == pytest.approx(16_000 * kv_bytes_per_token(HF) / (0.6 * 3.35e12))
    many_s = 2 * num_multiplied_parameters(HF) * 100_000 / (0.6 * 989e12)
    assert law.step_s(100_000, 0) == pytest.approx(BASE_S + many_s)
    assert 100_000 * law.prefill_s == pytest.approx(many_s)


def test_ranks_divide_the_reading_and_add_messages():
    one, four, sixteen = (law_of(ranks) for ranks in (1, 4, 16))
    alone_s = one.step_s(16, 16_000) - BASE_S
    messages_s = 2 * 48 * 15e-6
    assert four.step_s(16, 16_000) == pytest.approx(BASE_S + messages_s + alone_s / 4)
    assert sixteen.base_s == pytest.approx(BASE_S + 2 * 48 * 50e-6)


def test_more_ranks_than_heads_of_keys_keep_copies_that_each_reads():
    assert HF.num_query_groups == 4
    assert [kv_copies(HF, ranks) for ranks in (1, 4, 8, 16)] == [1, 1, 2, 4]
    four, eight = law_of(4), law_of(8)
    assert eight.context_s == pytest.approx(four.context_s)
    weights = 2 * HF.num_parameters
    pools = [0.85 * 80 * 2**30 * ranks - weights for ranks in (4, 8)]
    assert eight.max_cached_tokens / four.max_cached_tokens == pytest.approx(
        pools[1] / (2 * pools[0])
    )


def test_a_recurrent_state_takes_the_room_of_tokens_and_keys_lie_in_few_layers():
    hf = shape_of("Qwen3.5-35B-A3B")
    assert kv_bytes_per_token(hf) == 2 * 10 * 2 * 256 * 2
    state = 30 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))
    assert state_bytes(hf) == state
    law = engine_law(hf, H100, ranks=2)
    assert law.state_tokens == pytest.approx(state / kv_bytes_per_token(hf))
    assert engine_law(HF, H100, ranks=2).state_tokens == 0.0


def test_latent_attention_has_no_heads_to_divide():
    deepseek = shape_of("DeepSeek-V3")
    assert kv_copies(deepseek, 16) == 16
    one_group = engine_law(deepseek, H100, ranks=32)
    groups = engine_law(deepseek, H100, ranks=32, attention_groups=8)
    assert one_group.context_s == pytest.approx(8 * groups.context_s)
    # Each group has the whole attention.
    assert groups.weights_s > 2 * one_group.weights_s
    assert groups.max_cached_tokens > 4 * one_group.max_cached_tokens


def test_what_does_not_hold_the_weights_is_none():
    with pytest.raises(ValueError, match="4 GPUs of 80 GiB do not hold 1342 GB"):
        EngineLaw.of(shape_of("DeepSeek-V3"), gpu_named("H100"), num_gpus=4, base_s=0.0, share=1.0)


def test_an_engine_in_fp8_reads_half_of_its_weights_and_of_its_cache():
    wide, mixture = engine_law(HF, H100, ranks=1), shape_of("Qwen3-30B-A3B")
    cache = engine_law(HF, H100, ranks=1, cache_bytes=1)
    assert cache.context_s == pytest.approx(wide.context_s / 2)
    assert cache.max_cached_tokens == pytest.approx(2 * wide.max_cached_tokens)
    before, after = (engine_law(mixture, H100, ranks=2, is_fp8=it) for it in (False, True))
    assert after.experts_s / before.experts_s == pytest.approx(0.51, abs=0.01)
    saved = 0.98 * mixture.num_parameters / kv_bytes_per_token(mixture)
    assert after.max_cached_tokens - before.max_cached_tokens == pytest.approx(saved, rel=0.01)
