"""One rank of a learner that trains, and publishes each version with its probe.

Usage: probes MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON ORDER_JSON
An order is {"steps": N, "lora": {..} or null, "weightbus": {..}}. Rank 0 writes what is in the
memory of each version to WORK_FOLDER/STEP.safetensors; each rank writes WORK_FOLDER/RANK.json with
the probes, whether the random state is as it was, and the bytes of the weights at the end.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from slipstream.learner.batches.packing import TrainTrajectory
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from tests.support.ranks.policy import random_outcomes
from tests.support.ranks.program import finish, join_ranks, planned, run, settings_of
from tests.support.ranks.run import section_of


def random_sequences(vocab_size: int) -> list[TrainTrajectory]:
    rng = np.random.default_rng(7)
    result = []
    for length in (9, 14, 20, 11, 17, 8, 12, 15):
        mask = np.arange(length) >= 3
        logprobs = np.where(mask, -3.0 + rng.random(length), 0.0)
        result.append(
            TrainTrajectory(
                token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=logprobs.astype(np.float32),
                temperature=1.0,
                version_steps=np.full(length, 4, np.int32),
            )
        )
    return result


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, order: str) -> None:
    orders = json.loads(order)
    learner = section_of(layout)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.publish.contents import AdaptersAlone, Contents
    from slipstream.learner.publish.weight_writer import WeightWriter
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.probe import Probe

    lora = msgspec.convert(orders["lora"] or {}, LoraSection)
    bus = msgspec.convert(orders["weightbus"], WeightBusSection)
    settings = settings_of(folder, learner, {}, seed=3, lora=lora, weightbus=bus)
    algorithm = algorithm_of(settings)
    policy = build_policy(settings, algorithm, topology)
    everything = random_sequences(policy.model.hf_config.vocab_size)
    plans, batches = planned(everything, learner, topology, minibatches=1, max_tokens=64)

    contents = AdaptersAlone(policy.model) if lora.is_named else Contents(policy.model)
    policy.bring_weights()
    writer = WeightWriter(policy.model, topology, bucket_bytes=1 << 16, contents=contents)
    probe = Probe(policy, bus, seed="a")
    probes, is_same = [], []
    for step in range(orders["steps"] + 1):
        if step:
            train_step(
                policy,
                batches,
                plans,
                random_outcomes(everything, step=step),
                algorithm,
                PhaseClock(),
            )
            policy.end_step()
        policy.bring_weights()
        before = torch.get_rng_state()
        assert not writer.write(0)
        found = probe.logprobs()
        is_same.append(torch.get_rng_state().equal(before))
        probes.append(msgspec.to_builtins(found))
        torch.distributed.barrier()
        if rank == 0:
            memory = SharedSlots.open(writer.paths, writer.layout)
            views = tensor_views(writer.layout, memory.slot(0))
            save_file({n: v.clone() for n, v in views.items()}, work / f"{step}.safetensors")
        torch.distributed.barrier()
    whole = hashlib.sha256()
    for _, weights in sorted(policy.model.named_weights(), key=lambda item: item[0]):
        whole.update(weights.detach().float().numpy().tobytes())
    report = {"probes": probes, "same": all(is_same), "weights": whole.hexdigest()}
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
