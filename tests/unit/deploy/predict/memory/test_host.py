from pathlib import Path

import pytest

from slipstream.deploy.config import run_config
from slipstream.deploy.predict.memory.host import (
    checkpoint_bytes,
    copies_memory,
    host_memory,
    most_checkpoints,
    versions_bytes,
)
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import CheckpointSection
from tests.support.tiny_run import tiny_inputs


def test_the_parts_of_a_host_on_the_cpu(tmp_path: Path):
    tiny_inputs(tmp_path)
    table = {
        "run": {"model": str(tmp_path / "model")},
        "data": {"file": str(tmp_path / "train.jsonl")},
        "learner": {"ranks": 4, "tensor_parallel": 2},
        "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 64},
        "generators": {"device": "cpu", "max_cached_tokens": 1000},
    }
    hf = load_hf_config(tmp_path / "model")
    count, hidden = hf.num_parameters, hf.hidden_size
    norms = (2 * hf.num_hidden_layers + 1) * hidden  # on both ranks of a replica
    held = 2 * (count + norms)
    output_layer = 0 if hf.tie_word_embeddings else hf.vocab_size * hidden
    critic = held - 2 * output_layer + 4 * (hidden + 1)  # a value head on each rank
    parts = host_memory(
        hf, run_config(table), learner_ranks=4, engines=3, frozen=[hf], has_critic=True
    )
    kv = 2 * hf.num_hidden_layers * hf.num_query_groups * hf.kv_channels * 4
    found = {part.what: part.num_bytes for part in parts}
    assert found.pop("activations") > 0
    assert found == {
        "learner": 12 * held,
        "critic": pytest.approx(12 * critic, rel=1e-4),
        "frozen policies": 4 * held,
        "engines' weights": 3 * 4 * count,
        "engines' caches": 3 * 1000 * kv,
    }
    assert host_memory(hf, run_config(table), learner_ranks=0, engines=0) == []
    assert versions_bytes(hf, on_gpu=True) == 6 * count
    assert checkpoint_bytes(hf, on_gpu=False) == 12 * count
    assert checkpoint_bytes(hf, on_gpu=True, has_critic=True) == 28 * count


def test_copies_take_memory_only_where_training_goes_on_beside_a_save(tmp_path: Path):
    tiny_inputs(tmp_path)
    hf = load_hf_config(tmp_path / "model")

    def num_bytes(checkpoint: CheckpointSection) -> list[float]:
        return [part.num_bytes for part in copies_memory(hf, checkpoint, on_gpu=True)]

    assert num_bytes(CheckpointSection(every_steps=5)) == [14 * hf.num_parameters]
    assert num_bytes(CheckpointSection(keep_best=True)) == [14 * hf.num_parameters]
    assert num_bytes(CheckpointSection()) == []
    assert num_bytes(CheckpointSection(every_steps=5, asynchronous=False)) == []


def test_one_checkpoint_more_than_is_kept_is_on_the_disk_while_it_is_written():
    assert most_checkpoints(CheckpointSection()) == 1
    assert most_checkpoints(CheckpointSection(every_steps=5, keep_last=3)) == 4
    assert most_checkpoints(CheckpointSection(keep_best=True)) == 4


def test_adapters_alone_are_saved_and_those_of_named_versions_published(tmp_path: Path):
    tiny_inputs(tmp_path)
    hf = load_hf_config(tmp_path / "model")
    lora = LoraSection(rank=2, targets=("q_proj",))
    queries = hf.num_attention_heads * hf.kv_channels
    count = hf.num_hidden_layers * 2 * (hf.hidden_size + queries)
    assert checkpoint_bytes(hf, on_gpu=False, lora=lora) == 12 * count
    with_critic = checkpoint_bytes(hf, on_gpu=False, has_critic=True, lora=lora)
    assert with_critic == 12 * (count + hf.num_parameters)
    assert versions_bytes(hf, on_gpu=False, lora=lora) == 3 * 4 * count
    merged = LoraSection(rank=2, targets=("q_proj",), publish="merged")
    assert versions_bytes(hf, on_gpu=False, lora=merged) == 3 * 4 * hf.num_parameters
