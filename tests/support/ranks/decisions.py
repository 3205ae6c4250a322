"""One rank of a learner that reads trajectories of an engine, with its decisions and without.

Usage: decisions MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON SUBMISSIONS_FILE
Writes the log-probabilities of each to WORK_FOLDER/RANK.json.
"""

from pathlib import Path

import msgspec

from slipstream.generators.rollout import Submission
from slipstream.learner.batches.packing import pack, unpack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.wire.messages.codec import decode_payload
from slipstream.wire.messages.trajectory import TrajectoryHeader, TrajectoryPayload
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of


def write_submissions(path: Path, cases: dict[str, list[Submission]]) -> None:
    """Write headers and payloads of each case for the ranks."""
    pairs = {
        name: [(message.header, frames[0]) for message, frames in submissions]
        for name, submissions in cases.items()
    }
    path.write_bytes(msgspec.msgpack.encode(pairs))


def read_submissions(path: Path) -> dict[str, list[tuple[TrajectoryHeader, TrajectoryPayload]]]:
    """Return what was written, by case."""
    pairs = dict[str, list[tuple[TrajectoryHeader, bytes]]]
    cases = msgspec.msgpack.decode(path.read_bytes(), type=pairs)
    return {
        name: [(header, decode_payload(frame)) for header, frame in case]
        for name, case in cases.items()
    }


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, file: Path) -> None:
    learner = section_of(layout, dtype="float32")
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.starting_policy import build_policy

    algo = {"kl": {"coefficient": 0.1, "name": "k3"}}
    settings = settings_of(folder, learner, algo, longest=64)
    policy = build_policy(settings, algorithm_of(settings), topology)
    vocab_size = policy.model.hf_config.vocab_size
    report: dict[str, dict[str, object]] = {}
    for name, whole in read_submissions(file).items():
        less = [(header, msgspec.structs.replace(one, decisions=None)) for header, one in whole]
        report[name] = {}
        for kind, payloads in {"with": whole, "without": less}.items():
            batch = pack(
                [unpack(*payload, vocab_size=vocab_size) for payload in payloads], device.device()
            )
            (outputs,) = policy.proximal([batch])
            assert policy.reference is not None
            (reference,) = policy.reference.logprobs([batch])
            report[name][kind] = {
                "logprobs": outputs.logprobs[batch.loss_mask].tolist(),
                "reference": reference[batch.loss_mask].tolist(),
                "engine": batch.behavior_logprobs[batch.loss_mask].tolist(),
                "entropy": outputs.entropy[batch.loss_mask].tolist(),
            }
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
