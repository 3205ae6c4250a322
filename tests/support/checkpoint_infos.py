"""A checkpoint.json as a learner writes it, and the folder of a checkpoint."""

from pathlib import Path

import msgspec

from slipstream.wire.files.checkpoints import (
    FORMAT_REVISION,
    CheckpointInfo,
    checkpoint_name,
    ledger_file,
)
from slipstream.wire.messages.versions import PolicyVersion


def checkpoint_info(version: PolicyVersion, **changes: object) -> CheckpointInfo:
    """Return the checkpoint.json of this version; ``changes`` are fields by name."""
    info = CheckpointInfo(
        format_revision=FORMAT_REVISION,
        run_name="a",
        version=version,
        saved_at="2026-01-01T00:00:00+00:00",
        model="/models/a",
        architecture={},
        parameters="",
        dtype="float32",
        ranks=1,
        tensor_parallel=1,
        packages={},
    )
    return msgspec.structs.replace(info, **changes)


def write_checkpoint(run: Path, epoch: int, step: int, *, revision: int = 2) -> Path:
    folder = run / "checkpoints" / checkpoint_name(step)
    folder.mkdir(parents=True)
    info = checkpoint_info(
        PolicyVersion(epoch, step),
        format_revision=revision,
        run_name=run.name,
        architecture={"hidden_size": 64},
        ranks=2,
        packages={"torch": "2"},
    )
    (folder / "checkpoint.json").write_bytes(msgspec.json.encode(info))
    (folder / "ledger.bin").write_bytes(ledger_file(b"ledger"))
    return folder
