"""Engines that hold a model."""

import json
from pathlib import Path

import pytest

from slipstream.deploy.predict.laws.gpus import Cluster, gpu_named, gpu_of
from slipstream.deploy.predict.memory.gpu import kv_bytes_per_token
from slipstream.deploy.predict.size.engines import engine_size, larger_engines, longest_tokens
from slipstream.wire.errors import ConfigError
from tests.support.planned import H100, config_of, shape_of

SMALL, LARGE = "Qwen3-30B-A3B", "Qwen3-235B-A22B"
HF = shape_of(SMALL)


def test_the_smallest_engine_holds_the_model_and_a_few_long_answers():
    one = engine_size(HF, config_of(SMALL), H100, 8)
    assert (one.ranks, one.groups, one.sglang) == (1, 1, {"tp_size": 1})
    left = 0.85 * 80 * 2**30 - 2 * HF.num_parameters
    assert one.cached_tokens == pytest.approx(left / kv_bytes_per_token(HF), rel=1e-3)
    assert one.cached_tokens >= 4 * longest_tokens(config_of(SMALL))


def test_more_ranks_than_heads_of_keys_are_groups_of_attention(tmp_path: Path):
    shape = {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    small = Cluster(gpu=gpu_of(12))
    one = engine_size(shape_of(str(tmp_path)), config_of(str(tmp_path)), small, 8)
    assert one.ranks == one.groups > 1
    assert one.sglang == {"tp_size": one.ranks, "attn_dp_size": one.groups}


def test_what_no_engine_holds_is_refused_with_the_numbers():
    told = r"no engine of up to 4 GPUs of 80 GiB .* 4,096 tokens \(the largest .* is of 4\)"
    with pytest.raises(ConfigError, match=told):
        engine_size(shape_of(LARGE), config_of(LARGE), H100, 4)
    # Its four heads of keys and values are split over the four ranks of each of two groups.
    found = engine_size(shape_of(LARGE), config_of(LARGE), H100, 64)
    assert found.sglang == {"tp_size": 8, "attn_dp_size": 2}
    h200 = Cluster(gpu=gpu_named("H200"))
    assert engine_size(shape_of(LARGE), config_of(LARGE), h200, 64).sglang == {"tp_size": 4}


def test_larger_engines_stay_on_a_host():
    small = engine_size(HF, config_of(SMALL), H100, 8)
    assert [one.ranks for one in larger_engines(HF, config_of(SMALL), H100, small)] == [2, 4]
    two = Cluster(gpu=gpu_named("H100"), gpus_per_host=2)
    assert [one.ranks for one in larger_engines(HF, config_of(SMALL), two, small)] == [2]


def test_latent_attention_keeps_the_whole_cache_of_a_group_on_each_of_its_ranks():
    name = "DeepSeek-V3"
    h200 = Cluster(gpu=gpu_named("H200"))
    one = engine_size(shape_of(name), config_of(name), h200, 64)
    assert one.ranks > one.groups == 1
    of_rank = 0.85 * 140 * 2**30 - 2 * shape_of(name).num_parameters / one.ranks
    assert one.cached_tokens == pytest.approx(
        of_rank / kv_bytes_per_token(shape_of(name)), rel=0.01
    )


def test_as_many_ranks_share_an_expert_in_larger_engines():
    def sizes(**sglang: int) -> list[dict[str, int]]:
        config = config_of(SMALL, generators={"sglang": sglang})
        small = engine_size(HF, config, H100, 8, fewest_gpus=sglang["tp_size"])
        return [size.sglang for size in (small, *larger_engines(HF, config, H100, small))]

    whole = [{"tp_size": 2, "ep_size": 2}, {"tp_size": 4, "ep_size": 4}]
    assert sizes(tp_size=2, ep_size=2)[:2] == whole
    assert sizes(tp_size=4, ep_size=2)[:1] == [{"tp_size": 4, "ep_size": 2}]


def test_ranks_have_experts_of_their_own_where_parts_of_an_expert_are_not_allowed():
    hf, wide = shape_of(LARGE), config_of(LARGE)
    assert engine_size(hf, wide, H100, 8, fewest_gpus=8).sglang == {"tp_size": 8, "attn_dp_size": 2}
    # 1,536 channels over eight ranks are no whole blocks.
    narrow = wide.with_settings("weightbus", precision="fp8")
    by_experts = {"tp_size": 8, "attn_dp_size": 2, "ep_size": 8}
    assert engine_size(hf, narrow, H100, 8, fewest_gpus=8).sglang == by_experts
