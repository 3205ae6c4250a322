"""One rank of a learner that trains, and publishes each version with its probe.

Usage: probes MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON ORDER_JSON
An order is {"steps": N, "lora": {..} or null, "weightbus": {..}}. Rank 0 writes what is in the
memory of each version to WORK_FOLDER/STEP.safetensors; each rank writes WORK_FOLDER/RANK.json with
the probes, whether the random state is as it was, and the bytes of the weights at the end.
"""

import hashlib
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.batches.plan import plan_step
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import RunSection, SamplingSection
from tests.support.ranks.policy import join_ranks, random_outcomes
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
    from slipstream.learner.model.topology import destroy_topology
    from slipstream.learner.publish.contents import AdaptersAlone, WholeModel
    from slipstream.learner.publish.weight_writer import WeightWriter
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.probe import Probe

    lora = msgspec.convert(orders["lora"] or {}, LoraSection)
    bus = msgspec.convert(orders["weightbus"], WeightBusSection)
    settings = LearnerSettings(
        run=RunSection(model=str(folder), seed=3),
        learner=learner,
        lora=lora,
        algo=AlgoSection(),
        weightbus=bus,
        sampling=SamplingSection(max_response_tokens=32),
    )
    algorithm = algorithm_of(settings)
    policy = build_policy(settings, algorithm, topology)
    everything = random_sequences(policy.model.hf_config.vocab_size)
    plans = plan_step(
        [len(s.token_ids) for s in everything],
        replicas=topology.data_parallel,
        minibatches=1,
        max_tokens=64,
        coupled=learner.sizes.couples_replicas,
        multiple_of=learner.sizes.microbatch_multiple,
    )
    batches = [
        [pack([everything[i] for i in indices], device.device()) for indices in share]
        for share in (plan.microbatches[topology.data_parallel_rank] for plan in plans)
    ]

    contents = AdaptersAlone(policy.model) if lora.is_named else WholeModel(policy.model)
    policy.bring_weights()
    writer = WeightWriter(policy.model, topology, bucket_bytes=1 << 16, contents=contents)
    probe = Probe(policy, bus, run_id="a")
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
            memory = SharedSlots.open(
                writer.path, slot_bytes=writer.layout.num_bytes, num_slots=NUM_SLOTS
            )
            views = tensor_views(writer.layout, memory.slot(0))
            save_file({n: v.clone() for n, v in views.items()}, work / f"{step}.safetensors")
        torch.distributed.barrier()
    whole = hashlib.sha256()
    for _, weights in sorted(policy.model.named_weights(), key=lambda item: item[0]):
        whole.update(weights.detach().float().numpy().tobytes())
    report = {"probes": probes, "same": all(is_same), "weights": whole.hexdigest()}
    (work / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    destroy_topology()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5], sys.argv[6])
