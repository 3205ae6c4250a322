"""One rank of a learner that does one learner step of two minibatches through ``Policy``.

Usage: policy_rank MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE TENSOR_PARALLEL
Writes WORK_FOLDER/RANK.json and, from rank 0, the trained model to WORK_FOLDER/trained.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from algos.config import AlgoSection
from learner import device
from learner.collate import TrainSequence, pack
from learner.config import LearnerSection
from learner.plan import plan_step
from tests.integration.tiny_models import sequences
from wire.phases import PhaseClock

ENDS = (5, 9)


def train_sequences() -> list[TrainSequence]:
    """Return sequences of unlike lengths, temperatures and bars; one has a prompt of one token."""
    rng = np.random.default_rng(2)
    result = []
    for number, tokens in enumerate(sequences()):
        length = len(tokens)
        num_prompt = 1 if number == 1 else max(1, length // 3)
        mask = np.arange(length) >= num_prompt
        barred = mask & (np.arange(length) < num_prompt + 2) if number % 2 else None
        result.append(
            TrainSequence(
                token_ids=np.array([t if t not in ENDS else 11 for t in tokens], np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -4.0 + rng.random(length), 0.0).astype(np.float32),
                advantage=float(rng.normal()),
                temperature=1.0 if number % 3 else 0.6,
                end_barred=barred,
                end_token_ids=ENDS if barred is not None else (),
            )
        )
    return result


def plain_logprobs(model: torch.nn.Module, sequence: TrainSequence) -> list[float]:
    """Return the logprobs of one sequence alone, by the formula as one would write it down."""
    from learner.model import packed_logits

    tokens = torch.from_numpy(sequence.token_ids).long()
    count = len(tokens)
    cu_seqlens = torch.tensor([0, count], dtype=torch.int32)
    with torch.no_grad():
        logits = packed_logits(model, tokens, torch.arange(count), cu_seqlens, count)
    values = [0.0]
    for t in range(1, count):
        row = (logits[t - 1] / sequence.temperature)[: model.hf_config.vocab_size].clone()
        if sequence.end_barred is not None and sequence.end_barred[t]:
            row[list(ENDS)] = float("-inf")
        chosen = torch.log_softmax(row, -1)[tokens[t]].item()
        values.append(chosen if sequence.loss_mask[t] else 0.0)
    return values


def main(folder: Path, work: Path, rank: int, world_size: int, tensor_parallel: int) -> None:
    device.prepare()
    device.set_threads(1)
    from learner.hf_config import load_hf_config
    from learner.hf_weights import load_hf_weights, save_hf_folder
    from learner.model import build_model
    from learner.policy import Policy
    from learner.step import Minibatch, train_step
    from learner.topology import destroy_topology, init_topology

    topology = init_topology(
        rank=rank,
        world_size=world_size,
        tensor_parallel=tensor_parallel,
        store=FileStore(str(work / "store"), world_size),
        seed=1,
        timeout_s=30.0,
    )
    model = build_model(load_hf_config(folder), dtype=torch.float32, extra={})
    load_hf_weights(model, folder)
    # A large epsilon: Adam amplifies rounding where the second moment is tiny.
    policy = Policy(model, LearnerSection(lr=1e-2, adam_epsilon=1e-3), topology)
    everything = train_sequences()
    plans = plan_step(
        [len(s.token_ids) for s in everything],
        replicas=topology.data_parallel,
        minibatches=2,
        max_tokens=24,
    )
    cpu = device.device()
    minibatches = [
        Minibatch(
            [
                pack([everything[i] for i in indices], cpu)
                for indices in plan.microbatches[topology.data_parallel_rank]
            ],
            sum(
                int(everything[i].loss_mask.sum())
                for share in plan.microbatches
                for indices in share
                for i in indices
            ),
        )
        for plan in plans
    ]
    # One pack of all, with its logprobs, for a comparison with the plain formula.
    together = pack(everything, cpu)
    logprobs = policy.proximal_logprobs([together])[0].tolist()
    plain: list[float] = []
    if world_size == 1:
        plain = [value for s in everything for value in plain_logprobs(model, s)]
    figures, _ = train_step(policy, minibatches, AlgoSection(), PhaseClock())
    save_hf_folder(model, work / "trained", folder)
    num_microbatches = [len(m.batches) for m in minibatches]
    report = {
        "figures": figures,
        "logprobs": logprobs,
        "plain": plain,
        "num_microbatches": num_microbatches,
    }
    (work / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    destroy_topology()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
