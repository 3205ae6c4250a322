"""One rank of a learner that builds its part of a model, updates it, and measures its memory.

Usage: python -m slipstream.learner.tools.measure SETTINGS.toml FOLDER RANK [section.key=value ...]
All ranks meet in FOLDER and write FOLDER/RANK.json. Weights are random: only config.json of
run.model is read. Layers that [learner.megatron] divides are divided evenly, as in the estimate.
Started by `slipstream plan --measure`; needs no GPU and uses none.
"""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil
import torch

from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.model.division import with_vision
from slipstream.learner.tools.command_ranks import main, topology_of
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of one rank, in bytes."""

    stage: int
    tensors: dict[str, int]  # bytes by kind: Trainable.held_bytes
    rss_before: int  # process with its libraries and groups, without a model
    rss_after: int  # process after one update


def microbatch(settings: LearnerSettings, vocab_size: int) -> PackedBatch:
    """Return a microbatch of learner.max_tokens_per_microbatch random tokens."""
    longest = settings.sampling.max_prompt_tokens + settings.sampling.max_response_tokens
    left, sequences = settings.learner.max_tokens_per_microbatch, []
    draw = np.random.default_rng(0)
    while left > 0:
        length = min(longest, left)
        left -= length
        sequences.append(
            TrainTrajectory(
                token_ids=draw.integers(0, vocab_size, length, dtype=np.int32),
                loss_mask=np.arange(length) > 0,
                behavior_logprobs=np.zeros(length, np.float32),
                temperature=1.0,
            )
        )
    return pack(sequences, device.device())


def measure(settings: LearnerSettings, folder: Path, rank: int) -> None:
    """Build this rank's model and optimizer, do one update on all ranks, and write its memory."""
    learner = settings.learner
    with topology_of(settings, folder, rank) as topology:
        process = psutil.Process()
        hf = with_vision(load_hf_config(settings.model), learner)
        _updated(_smallest(hf, learner), settings, topology)  # memory that libraries take once
        before = _resident(process)
        policy = _updated(hf, settings, topology)
        after = _resident(process)
        measured = Measured(
            stage=topology.stage, tensors=policy.held_bytes(), rss_before=before, rss_after=after
        )
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(measured))


def _resident(process: psutil.Process) -> int:
    """Return the process's memory, without memory that its allocator keeps for later."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    return int(process.memory_info().rss)


def _smallest(hf: HfConfig, learner: LearnerSection) -> HfConfig:
    """Return an architecture with very few parameters that the same ranks can divide."""
    sizes = learner.sizes
    return msgspec.structs.replace(
        hf,
        num_hidden_layers=sizes.pipeline * sizes.chunks,
        hidden_size=8 * hf.num_attention_heads,
        head_dim=8,
        intermediate_size=8 * sizes.tensor,
        moe_intermediate_size=8 * sizes.expert_tensor,
        vocab_size=64,
        vision=None,
        trains_vision=False,
    )


def _updated(hf: HfConfig, settings: LearnerSettings, topology: "Topology") -> "Policy":
    """Return a random policy after one update that fills the pipeline."""
    from slipstream.algos.compose import PolicyOutputs
    from slipstream.learner.model.adapters.lora import add_adapters
    from slipstream.learner.model.division import section_for
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.training.policy import Policy

    learner = section_for(hf, settings.learner)
    dtype = torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32
    model = build_model(hf, dtype=dtype, extra=learner.megatron, learner=learner).train()
    if settings.lora.is_on:
        add_adapters(model, settings.lora.facts(), seed=settings.run.seed)
    policy = Policy(model, learner, topology)

    def loss_of(
        _number: int, _batch: PackedBatch, outputs: PolicyOutputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -outputs.logprobs.mean(), {}

    passes = learner.sizes.pipeline * learner.sizes.chunks
    policy.update([microbatch(settings, hf.vocab_size)] * passes, loss_of)
    return policy


if __name__ == "__main__":
    main(measure)
