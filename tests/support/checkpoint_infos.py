"""A checkpoint.json as a learner writes it, and the folder of a checkpoint."""

from pathlib import Path

import msgspec

from slipstream.learner.checkpoints.digests import write_digests
from slipstream.wire.files.checkpoints import (
    FORMAT_REVISION,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
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


def saved_checkpoint(
    run: Path, version: PolicyVersion, **changes: object
) -> tuple[Path, CheckpointInfo]:
    """Write a checkpoint with files that hold its version; return its folder and info."""
    folder = run / "checkpoints" / checkpoint_name(version.step)
    folder.mkdir(parents=True, exist_ok=True)
    info = checkpoint_info(version, run_name=run.name, has_digests=True, **changes)
    (folder / "__0_0.distcp").write_bytes(f"tensors of {version.label}".encode())
    (folder / "common.pt").write_bytes(b"common")
    write_digests(folder)
    (folder / "checkpoint.json").write_bytes(encode_info(info))
    (folder / "ledger.bin").write_bytes(ledger_file(b"ledger"))
    return folder, info
