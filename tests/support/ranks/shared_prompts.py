"""One rank of a learner that trains siblings, with prompts that are computed once and again.

Its routers, if any, repeat their choices of before an update.

Usage: shared_prompts MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: what is the same either way, and how many tokens a layer was given.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import random_outcomes, whole_plan
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of
from tests.support.ranks.sequence_parallel import ALGO

# Prompt and response tokens of each trajectory, siblings apart: three of four share 9 tokens, a
# pair 6; a prompt of another 9 tokens and one of a single token are nobody else's.
LENGTHS = [
    ("a", 9, 3),
    ("b", 6, 7),
    ("a", 9, 1),
    ("c", 9, 2),
    ("a", 9, 5),
    ("b", 6, 2),
    ("d", 1, 4),
]
NUM_SAVED = 2 * 9 + 6


def siblings() -> list[TrainTrajectory]:
    """Return trajectories that begin with each other's prompts; the last has a second branch."""
    draw = np.random.default_rng(8)
    prompts = {name: draw.integers(0, 128, count, np.int32) for name, count, _ in LENGTHS}
    result = []
    for name, num_prompt, num_response in LENGTHS:
        ids = np.append(prompts[name], draw.integers(0, 128, num_response, np.int32))
        mask = np.arange(len(ids)) >= num_prompt
        result.append(
            TrainTrajectory(
                token_ids=ids,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                temperature=0.8,
                version_steps=np.full(len(ids), 3, np.int32),
            )
        )
    last = result[-1]
    twice = {
        name: np.concatenate([getattr(last, name)] * 2)
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "version_steps")
    }
    return [*result[:-1], replace(last, branches=(len(last.token_ids),), **twice)]


def distance_of_ways(batch: PackedBatch) -> float:
    """Return how far attention by a GPU's bounds is from that which a CPU computes."""
    from slipstream.learner.model import attention
    from slipstream.learner.model.context import TokenSplit
    from slipstream.learner.model.rotary import Rotation
    from tests.support.bounded_attention import bounded_attention

    shared = batch.shared
    assert shared is not None
    count = len(shared.computed)
    layout = attention.PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=shared.cu_queries,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=shared.max_queries,
        max_seqlen_kv=max(batch.lengths),
        lengths=batch.lengths,
        rotation=Rotation(torch.empty(0), torch.empty(0)),
        split=TokenSplit(count, count),
        shared=shared,
    )
    draw = torch.Generator().manual_seed(1)
    sizes = [(count, 4, 8), (count, 2, 8), (count, 2, 8)]
    given = [torch.randn(size, generator=draw, requires_grad=True) for size in sizes]
    query, key, value = given
    ours = attention.shared_attention(query, key, value, layout, shared, 0.3)
    every = shared.of_all(key), shared.of_all(value)
    theirs = bounded_attention(query, *every, layout.bounds, 0.3)
    weights = torch.randn(ours.shape, generator=draw)
    gradients = [torch.autograd.grad((o * weights).sum(), given) for o in (ours, theirs)]
    pairs = [(ours, theirs), *zip(*gradients, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    learner = section_of(layout, lr=1e-2, adam_epsilon=1e-3, dtype="float32", minibatches=2)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.starting_policy import build_policy
    from slipstream.wire.models.hf_config import load_hf_config

    has_experts = load_hf_config(folder).num_routed_experts > 0
    settings = settings_of(folder, learner, ALGO, replay="R2" if has_experts else "off")
    algorithm, everything = algorithm_of(settings), siblings()
    report: dict[str, object] = {}
    for shares_prompts in (False, True):
        batch = pack(everything, device.device(), shares_prompts=shares_prompts)
        policy = build_policy(settings, algorithm, topology)
        assert policy.reference is not None
        assert policy.critic is not None
        rows: list[int] = []
        _, layer = next(iter(policy.model.numbered_layers()))
        hook = layer.register_forward_hook(
            lambda _layer, _given, output, rows=rows: rows.append(output[0].size(0))
        )
        before = policy.proximal([batch])[0]
        hook.remove()
        data = random_outcomes(everything)
        figures = [
            train_step(policy, [[batch]], [whole_plan(everything)], data, algorithm, PhaseClock())
            for _ in range(2)  # a critic has a gradient into its layers once its head is not 0
        ]
        report[str(shares_prompts)] = {
            "rows": rows[0],
            "logprobs": before.logprobs.tolist(),
            "entropy": before.entropy.tolist(),
            "reference": policy.reference.logprobs([batch])[0].tolist(),
            "trained": policy.proximal([batch])[0].logprobs.tolist(),
            "values": policy.critic.values([batch])[0].tolist(),
            "figures": [found for found, _ in figures],
        }
    report["ways"] = distance_of_ways(pack(everything, torch.device("cpu"), shares_prompts=True))
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
