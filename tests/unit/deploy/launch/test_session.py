"""What the end of a run says of uploads."""

from pathlib import Path

import msgspec
import pytest

from slipstream.deploy.launch.session import missing_upload
from slipstream.wire.files.checkpoints import UPLOAD_FILE, UploadState
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.checkpoint_infos import saved_checkpoint


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (None, ""),
        (UploadState(url="s3://b/r", step=4, error="an older one cannot be removed"), ""),
        (UploadState(url="s3://b/r", step=2), "step-000004 is not in s3://b/r (checkpoint.upload)"),
        (
            UploadState(url="s3://b/r", step=2, num_failed=3, error="Forbidden"),
            "step-000004 is not in s3://b/r (checkpoint.upload): Forbidden",
        ),
    ],
)
def test_newest_checkpoint_that_is_not_uploaded_is_named(
    tmp_path: Path, state: UploadState | None, line: str
):
    checkpoint, _ = saved_checkpoint(tmp_path, PolicyVersion(1, 4))
    if state is not None:
        (checkpoint.parent / UPLOAD_FILE).write_bytes(msgspec.json.encode(state))
    assert missing_upload(checkpoint) == line
