"""GPUs by name or memory, and the links between ranks."""

import pytest

from slipstream.deploy.predict.laws.gpus import Cluster, gpu_named
from slipstream.wire.errors import ConfigError


def test_a_gpu_is_known_by_its_name_in_any_case():
    assert gpu_named("h100").peak_flops == 989e12
    assert (gpu_named("H20").memory_gib, gpu_named("H20").peak_flops) == (96, 148e12)


@pytest.mark.parametrize("text", ["40", "40GiB", "40.0"])
def test_gib_alone_are_a_gpu_with_the_rates_of_an_h100(text: str):
    gpu = gpu_named(text)
    assert (gpu.memory_gib, gpu.hbm_bytes_s) == (40, 3.35e12)
    assert "rates of H100" in gpu.name


@pytest.mark.parametrize("text", ["H1000", "", "-3", "0", "nan", "inf"])
def test_anything_else_is_refused_with_the_names_that_are_known(text: str):
    with pytest.raises(ConfigError, match=r"--gpu is .*expected A100, H100.* or GiB of memory"):
        gpu_named(text)


def test_what_leaves_a_host_takes_its_nics():
    cluster = Cluster(gpu=gpu_named("H100"), nics=4, nic_bytes_s=50e9)
    assert cluster.network_bytes_s == 25e9
    assert cluster.exchange_s(450e9, 8) == 1.0
    # Half of 16 ranks are on the host: half over NVLink, half over the GPU's share of four NICs.
    assert cluster.exchange_s(450e9, 16) == pytest.approx(0.5 + 225 / 25)
    assert (cluster.hosts(8), cluster.hosts(9)) == (1, 2)
