from slipstream.weightbus.net.compatibility import Libraries, why_no_collective
from slipstream.wire.messages.weightbus import Join


def test_only_like_libraries_share_a_collective():
    for device, torch_version, nccl, why in [
        ("cpu", "2.13.0", "", ""),
        ("cpu", "2.13.0+cu130", "2.30", ""),
        ("cpu", "2.12.0", "", "its torch is 2.12.0, the relay's 2.13.0"),
        ("cuda", "2.13.0", "2.28.3", ""),
        ("cuda", "2.13.0", "2.27.5", "its NCCL is 2.27.5, the relay's 2.28.3"),
        ("cuda", "2.13.0", "", "its NCCL is unknown, the relay's 2.28.3"),
    ]:
        join = Join(
            name="a", incarnation="b", device=device, torch_version=torch_version, nccl_version=nccl
        )
        assert why_no_collective(join, Libraries("2.13.0+cpu", "2.28.3")) == why
