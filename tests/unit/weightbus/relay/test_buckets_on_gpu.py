"""Each bucket is copied to a device once for all groups."""

import torch

from slipstream.weightbus.relay.buckets_on_gpu import BucketsOnGpu
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot

META = torch.device("meta")  # in place of a GPU: a copy to it is a tensor of its own


def test_groups_share_copies_and_only_the_last_ones_are_kept():
    tensors = {f"layer.{i}": torch.zeros(64) for i in range(6)}
    snapshot = CopiedSnapshot.of(PolicyVersion(1, 1), tensors, bucket_bytes=256)
    buckets = BucketsOnGpu(snapshot)
    first = buckets.get(0, META)
    assert buckets.get(0, META) is first
    assert first.numel() == 256
    for index in range(1, 5):
        buckets.get(index, META)
    again = buckets.get(0, META)
    assert again is not first
    buckets.clear()
    assert buckets.get(0, META) is not again


def test_a_cpu_sends_the_slot_itself():
    snapshot = CopiedSnapshot.of(PolicyVersion(1, 1), {"one": torch.ones(4)}, bucket_bytes=64)
    flat = BucketsOnGpu(snapshot).get(0, torch.device("cpu"))
    assert flat.data_ptr() == snapshot.bucket(0).data_ptr()
