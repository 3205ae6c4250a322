"""Loads a checkpoint of which one file after the other is missing, empty or cut off.

Usage: damaged MODEL_FOLDER WORK_FOLDER
Writes WORK_FOLDER/0.json: by file and damage, what loading it was refused with.
"""

import shutil
from pathlib import Path

import torch

from slipstream.learner.batches.packing import pack
from slipstream.learner.config import LearnerSection
from slipstream.learner.model import device
from slipstream.wire.files.checkpoints import FORMAT_REVISION, CheckpointInfo
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.ranks.policy import algorithm, random_outcomes, train_sequences, whole_plan
from tests.support.ranks.program import finish, join_ranks, run
from tests.support.waiting import HANG_S


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    damaged = {"empty": b"", "half": data[:middle], "tail": data[:-1], "bit": flipped}
    if how != "missing":
        path.write_bytes(damaged[how])


def main(folder: Path, work: Path) -> None:
    topology = join_ranks(work, 0, 1, LearnerSection())
    from slipstream.learner.checkpoints.files import Save
    from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash
    from slipstream.learner.checkpoints.loading import DamagedCheckpointError, load_checkpoint
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.weights.hf_weights import load_hf_weights
    from slipstream.learner.training.policy import Policy
    from slipstream.learner.training.step import train_step
    from slipstream.wire.models.hf_config import load_hf_config
    from slipstream.wire.process.phases import PhaseClock

    def policy() -> Policy:
        model = build_model(load_hf_config(folder), dtype=torch.float32, extra={})
        load_hf_weights(model, folder)
        return Policy(model, LearnerSection(), topology)

    trained = policy()
    everything = train_sequences()
    batch, plan = pack(everything, device.device()), whole_plan(everything)
    train_step(trained, [[batch]], [plan], random_outcomes(everything), algorithm(), PhaseClock())
    info = CheckpointInfo(
        format_revision=FORMAT_REVISION,
        run_name="a",
        version=PolicyVersion(1, 1),
        saved_at="",
        model=str(folder),
        architecture=architecture_of(trained.model.hf_config),
        parameters=parameters_hash(trained.model),
        dtype=dtype_name(trained.model),
        ranks=1,
        tensor_parallel=1,
        packages={},
        has_digests=True,
    )
    save = Save(trained, topology, work, info, lambda: b"ledger", timeout_s=HANG_S)
    save.wait()
    whole = save.path
    load_checkpoint(policy(), topology, whole, info)
    refused: dict[str, str] = {}
    for file in sorted(whole.iterdir()):
        if file.name in {"checkpoint.json", "ledger.bin"}:  # not what the learner loads
            continue
        for how in ("missing", "empty", "half", "tail", "bit"):
            copy = work / f"{file.name}-{how}"
            shutil.copytree(whole, copy)
            damage(copy / file.name, how)
            try:
                load_checkpoint(policy(), topology, copy, info)
            except DamagedCheckpointError as error:
                refused[copy.name] = str(error)
            else:
                refused[copy.name] = "loaded"
    finish(work / "0.json", refused)


if __name__ == "__main__":
    run(main)
