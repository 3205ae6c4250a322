"""One rank of a learner that does one learner step of two minibatches through ``Policy``.

Usage: policy MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Trains one policy per algorithm; the reference policy is that of WORK_FOLDER/../reference. Writes
WORK_FOLDER/RANK.json and, from rank 0, the trained models to WORK_FOLDER/ALGORITHM.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from slipstream.algos.advantages import Outcomes
from slipstream.algos.compose import Algorithm
from slipstream.algos.config import choice_of
from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import KeptTokens, PackedBatch, TrainTrajectory, pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.learner.training.step_data import StepData
from slipstream.wire.files.checkpoints import FORMAT_REVISION, CheckpointInfo
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.hf_config import name_alone
from slipstream.wire.models.model_files import WEIGHTS
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.sections import RoutingReplay
from tests.support.published_parts import written_tensors
from tests.support.ranks.program import finish, join_ranks, planned, run, settings_of
from tests.support.ranks.run import section_of
from tests.support.seen_images import with_images
from tests.support.tiny_models import sequences
from tests.support.waiting import HANG_S

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy
    from slipstream.wire.models.hf_config import HfConfig

ENDS = (5, 9)
REPLAYS: dict[str, RoutingReplay] = {"kept": "R3", "sequences": "R3", "group": "R2", "critic": "R2"}


VOCABULARY = 128  # of the tiny models


def train_sequences() -> list[TrainTrajectory]:
    """Return sequences of unlike lengths, temperatures and bars; one has a prompt of one token.

    Every third was sampled from few tokens.
    """
    rng = np.random.default_rng(2)
    result = []
    for number, tokens in enumerate(sequences()):
        length = len(tokens)
        num_prompt = 1 if number == 1 else max(1, length // 3)
        mask = np.arange(length) >= num_prompt
        barred = mask & (np.arange(length) < num_prompt + 2) if number % 2 else None
        token_ids = np.array([t if t not in ENDS else 11 for t in tokens], np.int32)
        result.append(
            TrainTrajectory(
                token_ids=token_ids,
                kept=few_kept(token_ids, mask) if number % 3 == 0 else None,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -4.0 + rng.random(length), 0.0).astype(np.float32),
                temperature=1.0 if number % 3 else 0.6,
                end_barred=barred,
                end_token_ids=ENDS if barred is not None else (),
                version_steps=rng.integers(3, 6, length).astype(np.int32),
            )
        )
    return result


def train_siblings() -> list[TrainTrajectory]:
    """Return ``train_sequences``, that with the longest prompt twice: it can be computed once."""
    return [*train_sequences(), train_sequences()[3]]


def few_kept(
    token_ids: "np.typing.NDArray[np.int32]", mask: "np.typing.NDArray[np.bool_]"
) -> KeptTokens:
    """Return 30 to 100 kept tokens for each of the response, its own among them."""
    rng = np.random.default_rng(4)
    sets = [
        np.union1d(rng.choice(VOCABULARY, rng.integers(30, 100), replace=False), [token])
        for token in token_ids[mask]
    ]
    counts = np.zeros(len(token_ids), np.int64)
    counts[mask] = [len(one) for one in sets]
    return KeptTokens(counts, np.concatenate(sets).astype(np.int64))


def with_experts(sequences: list[TrainTrajectory], hf: "HfConfig") -> list[TrainTrajectory]:
    """Return the sequences with random experts for each token but the last, if there are any."""
    if not hf.num_routed_experts:
        return sequences
    rng = np.random.default_rng(6)
    result = []
    for sequence in sequences:
        shape = (len(sequence.token_ids), hf.num_sparse_layers, hf.num_routed_experts)
        chosen = rng.random(shape).argsort(axis=-1)[..., : hf.experts_per_token]
        chosen[-1] = -1
        result.append(dataclasses.replace(sequence, experts=chosen.astype(np.int16)))
    return result


def random_outcomes(sequences: list[TrainTrajectory], step: int = 0) -> StepData:
    """Return a random reward for each sequence, in groups of two."""
    count = len(sequences)
    rng = np.random.default_rng(3)
    return StepData(
        outcomes=Outcomes(
            rewards=torch.from_numpy(rng.normal(size=count)),
            groups=torch.arange(count) // 2,
            num_groups=(count + 1) // 2,
            lengths=torch.tensor([int(s.loss_mask.sum()) for s in sequences]),
        ),
        is_truncated=torch.zeros(count, dtype=torch.bool),
        step=step,
        seed=0,
    )


def whole_plan(sequences: list[TrainTrajectory]) -> MinibatchPlan:
    """Plan one minibatch of one microbatch of one replica."""
    return MinibatchPlan(((tuple(range(len(sequences))),),))


def algorithm(**settings: object) -> Algorithm:
    """Return the algorithm of an [algo] section."""
    return Algorithm(choice_of(AlgoSection(**settings)), max_response_tokens=32)


def plain_logprobs(model: torch.nn.Module, sequence: TrainTrajectory) -> list[float]:
    """Return the logprobs of one sequence alone, by the formula as one would write it down."""
    from tests.support.logits import packed_logits

    tokens = torch.from_numpy(sequence.token_ids).long()
    count = len(tokens)
    given = (tokens, torch.arange(count), torch.tensor([0, count], dtype=torch.int32))
    with torch.no_grad():
        on_device = [one.to(device.device()) for one in given]
        images = pack([sequence], device.device()).images
        logits = packed_logits(model, *on_device, [count], images).cpu()
    values = [0.0]
    for t in range(1, count):
        row = (logits[t - 1] / sequence.temperature)[: model.hf_config.vocab_size].clone()
        if sequence.end_barred is not None and sequence.end_barred[t]:
            row[list(ENDS)] = float("-inf")
        if sequence.kept is not None and sequence.kept.counts[t]:
            start = sequence.kept.counts[:t].sum()
            left_out = torch.ones(len(row), dtype=torch.bool)
            left_out[sequence.kept.ids[start : start + sequence.kept.counts[t]]] = False
            row[left_out] = float("-inf")
        chosen = torch.log_softmax(row, -1)[tokens[t]].item()
        values.append(chosen if sequence.loss_mask[t] else 0.0)
    return values


def algorithms(reference: Path) -> dict[str, dict[str, object]]:
    """Return an [algo] section for each algorithm."""
    kl = {"coefficient": 0.1, "reference": str(reference)}
    penalty = {**kl, "name": "k1", "place": "reward"}
    return {
        "default": {},
        "critic": {"preset": "vapo", "critic": {"warmup_steps": 0, "lr": 1e-2}, "kl": penalty},
        "kept": {
            "preset": "m2po",
            "reduce": {"name": "sequence-mean-token-mean", "denominator": "kept"},
            "correction": {"m2po": {"threshold": 4.0}, "veto": {"threshold": 0.0001}},
            "kl": {**kl, "name": "full"},
            "entropy_bonus": 0.01,
            "data": {"zero_variance": "mask"},
        },
        "group": {"preset": "grpo", "whiten": "group", "kl": penalty},
        "taught": {
            "preset": "distill",
            "advantage": "grpo",
            "teacher": {"model": str(reference), "coefficient": 0.5, "clip": 2.0},
            "kl": {**kl, "name": "k3", "importance_weighted": True},
            "likelihood": {"coefficient": 0.1, "least_reward": 0.3},
            "whiten": "batch-leave-one-out",
        },
        "whole": {
            "preset": "m2po",
            "advantage": "optimal-token-baseline",
            "correction": {
                "m2po": False,
                "clip-cov": {"share": 0.2, "low": -1.0, "high": 9.0},
                "kl-cov": {"share": 0.2, "coefficient": 0.3},
                "staleness-decay": {},
            },
            "kl": {"coefficient": 0.1, "name": "k2", "to": "behavior"},
        },
        "sequences": {"preset": "gspo"},
        "normalized": {
            "preset": "rloo",
            "correction": {"importance-sampling": {"level": "sequence", "normalize": True}},
            "kl": {**kl, "name": "k1+", "renew_every": 1},
        },
    }


def distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference."""
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if len(a)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def checkpoint_info(
    policy: "Policy", settings: LearnerSettings, topology: "Topology", **others: bool
) -> CheckpointInfo:
    """Describe a checkpoint of a policy."""
    from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash

    return CheckpointInfo(
        format_revision=FORMAT_REVISION,
        run_name="a",
        version=PolicyVersion(1, 1),
        saved_at="",
        model=str(settings.model),
        architecture=architecture_of(policy.model.hf_config),
        parameters=parameters_hash(policy.model),
        dtype=dtype_name(policy.model),
        ranks=topology.world_size,
        tensor_parallel=topology.sizes.tensor,
        parallel=topology.sizes.others(),
        packages={},
        has_digests=True,
        has_divided_optimizer=policy.divides_optimizer,
        **others,
    )


def restored_reference(
    policy: "Policy",
    settings: LearnerSettings,
    topology: "Topology",
    work: Path,
    batches: Sequence[PackedBatch],
) -> dict[str, float]:
    """Save; return how far the reference of a policy is from ours, made anew and then loaded."""
    from slipstream.learner.checkpoints.files import Save, prepare_folder
    from slipstream.learner.checkpoints.loading import load_checkpoint
    from slipstream.learner.starting_policy import build_policy

    info = checkpoint_info(policy, settings, topology, has_reference=True)
    if topology.rank == 0:
        prepare_folder(work / "checkpoints")
    torch.distributed.barrier()
    folder = work / "checkpoints"
    save = Save(policy, topology, folder, info, lambda: b"ledger", timeout_s=HANG_S)
    save.wait()
    again = build_policy(settings, algorithm_of(settings), topology)
    assert policy.reference is not None
    assert again.reference is not None
    ours = policy.reference.logprobs(batches)
    made_anew = distance(again.reference.logprobs(batches), ours)
    load_checkpoint(again, topology, save.path, info)
    return {"made anew": made_anew, "restored": distance(again.reference.logprobs(batches), ours)}


def published(
    policy: "Policy", topology: "Topology", exported: Path, *, in_parts: bool = True
) -> list[str]:
    """Publish; return the tensors in the memory, as rank 0 sees it, that are not as exported."""
    from slipstream.learner.publish.weight_writer import WeightWriter

    writer = WeightWriter(policy.model, topology, bucket_bytes=4096, in_parts=in_parts)
    bad = writer.write(1)
    assert not bad, bad
    torch.distributed.barrier()
    if topology.rank != 0:
        return []
    views, shapes = written_tensors(writer, 1), policy.model.hf_config.tensor_shapes
    alone = {name_alone(name): tensor for name, tensor in load_file(exported / WEIGHTS).items()}
    right = {name: tensor for name, tensor in alone.items() if name in shapes}
    assert views.keys() == right.keys()
    return sorted(name for name, view in views.items() if not view.equal(right[name]))


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    # A large epsilon: Adam amplifies rounding where the second moment is tiny.
    dtype = json.loads(layout).get("dtype", "float32")
    learner = section_of(layout, lr=1e-2, adam_epsilon=1e-3, dtype=dtype, minibatches=2)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.trainable import Trainable
    from slipstream.wire.models.hf_config import load_hf_config

    Trainable.bucket_parameters = 20_000  # a tiny model fits into one bucket of the usual size
    hf = load_hf_config(folder)
    everything = with_images(with_experts(train_sequences(), hf), hf)
    plans, minibatches = planned(everything, learner, topology, minibatches=2, max_tokens=24)
    report: dict[str, object] = {"num_microbatches": [len(batches) for batches in minibatches]}
    figures = {}
    for name, algo in algorithms(work.parent / "reference").items():
        replay = REPLAYS.get(name, "off") if hf.num_routed_experts else "off"
        settings = settings_of(folder, learner, algo, replay=replay)
        policy = build_policy(settings, algorithm_of(settings), topology)
        if name == "default":  # one pack of all, for a comparison with the plain formula
            how = policy._chunks[0].ddp_config
            report["overlaps"] = [how.overlap_grad_reduce, how.overlap_param_gather]
            report["buckets"] = len(policy._chunks[0].bucket_groups)
            together = pack(everything, device.device())
            report["logprobs"] = policy.proximal([together])[0].logprobs.tolist()
            if world_size == 1:
                policy.bring_weights()
                report["plain"] = [
                    value for s in everything for value in plain_logprobs(policy.model, s)
                ]
        if policy.critic is not None:  # a head of zeros has no gradient into the trunk
            warm = msgspec.structs.replace(
                settings,
                algo=AlgoSection(**{**algo, "critic": {"warmup_steps": 1, "lr": 1e-2}}),  # type: ignore[arg-type]
            )
            train_step(
                policy,
                minibatches,
                plans,
                random_outcomes(everything),
                algorithm_of(warm),
                PhaseClock(),
            )
        figures[name], _ = train_step(
            policy,
            minibatches,
            plans,
            random_outcomes(everything, step=5),
            algorithm_of(settings),
            PhaseClock(),
            num_lags=3,
        )
        policy.bring_weights()
        save_hf_folder(policy.model, work / name, folder)
        if name == "default":
            report["published"] = published(policy, topology, work / name)
        if policy.renews_reference:
            batches = minibatches[0]
            policy.renew_reference()
            assert policy.reference is not None
            renewed = policy.reference.logprobs(batches)
            mine = [outputs.logprobs for outputs in policy.proximal(batches)]
            report["renewed"] = distance(renewed, mine)
            report |= restored_reference(policy, settings, topology, work, batches)
    report["figures"] = figures
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
