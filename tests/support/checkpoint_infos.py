"""A checkpoint.json as a learner writes it."""

import msgspec

from slipstream.wire.files.checkpoints import FORMAT_REVISION, CheckpointInfo
from slipstream.wire.messages.versions import PolicyVersion


def checkpoint_info(version: PolicyVersion, **changes: object) -> CheckpointInfo:
    """Return what checkpoint.json says of this version; ``changes`` are fields by name."""
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
