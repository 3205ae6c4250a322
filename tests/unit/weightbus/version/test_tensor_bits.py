"""The bits of tensors, with torch and without."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.weightbus.version.disk import write_version
from slipstream.weightbus.version.engine_checksums import EngineLayout, expected_checksums
from slipstream.weightbus.version.tensor_bits import bits_in, bits_in_folder, bits_of
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot

TENSORS = {
    "model.layers.0.mlp.down_proj.weight": torch.randn(4, 40).to(torch.bfloat16),
    "model.norm.weight": torch.randn(7),
    "lm_head.weight": torch.randn(70, 3).to(torch.float16),
}


def snapshot() -> CopiedSnapshot:
    return CopiedSnapshot.of(PolicyVersion(1, 2), TENSORS, bucket_bytes=200)


def test_bits_have_the_shape_and_the_bytes_of_their_tensor():
    for tensor in (*TENSORS.values(), torch.randn(3, 5).t(), torch.tensor(2.0)):
        bits = bits_of(tensor)
        assert bits.shape == tuple(tensor.shape)
        assert bits.itemsize == tensor.element_size()
        assert bits.tobytes() == bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        assert bits_of(bits) is bits


def test_the_memory_of_a_version_and_its_file_hold_the_same_bits(tmp_path: Path):
    sent = snapshot()
    folder = write_version(tmp_path, sent.manifest(), sent.memory.numpy().data)
    for found in (bits_in(sent.memory.numpy(), sent.layout), bits_in_folder(folder, sent.layout)):
        assert found.keys() == TENSORS.keys()
        assert all(np.array_equal(found[name], bits_of(TENSORS[name])) for name in TENSORS)


def test_torch_takes_bits_of_a_file_without_a_warning_and_the_file_cannot_be_changed(
    tmp_path: Path,
):
    sent = snapshot()
    folder = write_version(tmp_path, sent.manifest(), sent.memory.numpy().data)
    for bits in bits_in_folder(folder, sent.layout).values():
        torch.from_numpy(bits.reshape(-1).view(np.uint8)).fill_(7)
    again = bits_in_folder(folder, sent.layout)
    assert all(np.array_equal(again[name], bits_of(TENSORS[name])) for name in TENSORS)


@pytest.mark.parametrize("of", [EngineLayout(), EngineLayout("cpu", 2), EngineLayout("cuda", 2)])
def test_checksums_are_those_of_the_tensors(of: EngineLayout):
    sent = snapshot()
    found = expected_checksums(bits_in(sent.memory.numpy(), sent.layout), of)
    assert found == expected_checksums(TENSORS, of)


def test_a_folder_of_another_version_is_refused(tmp_path: Path):
    with pytest.raises(PublishError, match="cannot read"):
        bits_in_folder(tmp_path, snapshot().layout)
