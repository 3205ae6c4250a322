"""One rank of a learner that trains adapters for some updates, with the base as reference policy.

Usage: lora MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON LORA_JSON
Writes WORK_FOLDER/RANK.json and, from rank 0, the merged models to WORK_FOLDER/merged-KL and the
adapters, as they are published, to WORK_FOLDER/adapters-KL.safetensors.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors.torch import save_file

from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from tests.support.published_parts import written_tensors
from tests.support.ranks.policy import (
    distance,
    plain_logprobs,
    published,
    random_outcomes,
    train_sequences,
)
from tests.support.ranks.program import finish, join_ranks, planned, run, settings_of
from tests.support.ranks.run import section_of
from tests.support.seen_images import with_images

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy

KL = {"full": {"name": "full"}, "k3": {"name": "k3"}}
NUM_STEPS = 2


def publish_adapters(policy: "Policy", topology: "Topology", file: Path) -> None:
    """Publish adapters alone; rank 0 writes down what is in the memory."""
    from slipstream.learner.publish.contents import AdaptersAlone
    from slipstream.learner.publish.weight_writer import WeightWriter

    contents = AdaptersAlone(policy.model)
    writer = WeightWriter(policy.model, topology, bucket_bytes=4096, contents=contents)
    assert not writer.write(1)
    torch.distributed.barrier()
    if topology.rank == 0:
        views = written_tensors(writer, 1)
        save_file({name: view.clone() for name, view in views.items()}, file)
    torch.distributed.barrier()
    writer.close()


def read_back(policy: "Policy", adapter: Path, model: Path) -> bool:
    """Write the adapters as a folder, and return whether they are the same when they are read."""
    from slipstream.learner.model.adapters.peft import adapters_of, load_adapter, save_adapter

    policy.bring_weights()
    save_adapter(policy.model, adapter, str(model))
    tensors = [held.tensor.detach() for held in adapters_of(policy.model).held()]
    written = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load_adapter(policy.model, adapter)
    return all(tensor.equal(before) for tensor, before in zip(tensors, written, strict=True))


def raw_logprobs(policy: "Policy", sequence: TrainTrajectory) -> list[float]:
    """Return the logprob of each next token, of temperature 1 and with every token allowed."""
    from tests.support.logits import packed_logits

    tokens = torch.from_numpy(sequence.token_ids).long()
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        places = torch.arange(len(tokens))
        logits = packed_logits(policy.model, tokens, places, ends, [len(tokens)], None)
    logprobs = logits[:-1, : policy.model.hf_config.vocab_size].float().log_softmax(-1)
    found: list[float] = logprobs.gather(-1, tokens[1:, None]).squeeze(-1).tolist()
    return found


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, lora: str) -> None:
    learner = section_of(layout, lr=2e-2, adam_epsilon=1e-3)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy

    everything = with_images(train_sequences(), load_hf_config(folder))
    plans, batches = planned(everything, learner, topology, minibatches=2, max_tokens=24)
    report: dict[str, object] = {}
    for name, kl in KL.items():
        settings = settings_of(
            folder,
            learner,
            {"kl": {"coefficient": 0.1, **kl}},
            seed=3,
            lora=msgspec.convert(json.loads(lora), LoraSection),
        )
        algorithm = algorithm_of(settings)
        policy = build_policy(settings, algorithm, topology)
        policy.bring_weights()
        base = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
        figures = []
        assert policy.reference is not None
        before = policy.reference.logprobs(batches[0])
        mine = [outputs.logprobs for outputs in policy.proximal(batches[0])]
        if world_size == 1:
            report[f"{name} raw at first"] = [raw_logprobs(policy, s) for s in everything]
        report[f"{name} adds at first"] = distance(before, mine)
        for step in range(NUM_STEPS):
            outcomes = random_outcomes(everything, step=step)
            trained, _ = train_step(policy, batches, plans, outcomes, algorithm, PhaseClock())
            figures.append(trained)
        report[f"{name} reference moved"] = distance(before, policy.reference.logprobs(batches[0]))
        policy.bring_weights()
        after = dict(policy.model.named_parameters())
        report[f"{name} base moved"] = [n for n in base if not after[n].equal(base[n])]
        report[f"{name} figures"] = figures
        report[f"{name} held"] = policy.held_bytes()
        report[f"{name} trained"] = sorted(
            p.grad is not None or hasattr(p, "main_grad") for p in policy.model.parameters()
        ).count(True)
        save_hf_folder(policy.model, work / f"merged-{name}", folder)
        report[f"{name} published"] = published(policy, topology, work / f"merged-{name}")
        if not policy.model.hf_config.family.stacks_experts or "gate_up_proj" not in lora:
            publish_adapters(policy, topology, work / f"adapters-{name}.safetensors")
        if world_size == 1:
            together = pack(everything, device.device())
            report[f"{name} logprobs"] = policy.proximal([together])[0].logprobs.tolist()
            report[f"{name} read back"] = read_back(policy, work / f"adapter-{name}", folder)
            report[f"{name} raw"] = [raw_logprobs(policy, s) for s in everything]
            policy.bring_weights()
            report[f"{name} plain"] = [
                value for s in everything for value in plain_logprobs(policy.model, s)
            ]
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
