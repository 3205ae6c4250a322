"""Rates of GPUs, hosts and links from data sheets, and the shares of them that are assumed."""

from dataclasses import dataclass

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.flops import peak_tflops_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU. NVIDIA's data sheets; rates are bytes per second, in one direction."""

    name: str
    memory_gib: float
    hbm_bytes_s: float
    nvlink_bytes_s: float  # bandwidth to GPUs of the same host; PCIe without NVLink
    peak_flops: float  # bfloat16, without sparsity


def _gpu(name: str, memory_gib: float, hbm_tb_s: float, nvlink_gb_s: float) -> Gpu:
    peak = peak_tflops_of(name)
    if peak is None:
        raise KeyError(name)
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        hbm_bytes_s=hbm_tb_s * 1e12,
        nvlink_bytes_s=nvlink_gb_s * 1e9,
        peak_flops=peak * 1e12,
    )


GPUS = tuple(
    _gpu(*row)
    for row in (
        ("A100", 80, 2.0, 300),
        ("H100", 80, 3.35, 450),
        ("H800", 80, 3.35, 200),
        ("H200", 140, 4.8, 450),
        ("H20", 96, 4.0, 450),
        ("B200", 180, 8.0, 900),
        ("GB200", 186, 8.0, 900),
        ("L40S", 48, 0.864, 32),
        ("L4", 24, 0.3, 32),
        ("A10", 24, 0.6, 32),
    )
)
_RATES_OF = "H100"  # assumed rates of a GPU that is known by memory alone


def gpu_named(text: str) -> Gpu:
    """Return a GPU by its name, or by GiB of memory with the rates of an H100.

    Raises:
        ConfigError: the text is neither.
    """
    by_name = {gpu.name.lower(): gpu for gpu in GPUS}
    if text.lower() in by_name:
        return by_name[text.lower()]
    try:
        gib = float(text.lower().removesuffix("gib"))
    except ValueError:
        gib = 0.0
    if not 0 < gib < 10_000:
        raise ConfigError(
            f"--gpu is {text!r}: expected {', '.join(gpu.name for gpu in GPUS)}, or GiB of memory"
        )
    return gpu_of(gib)


def gpu_of(memory_gib: float) -> Gpu:
    """Return a GPU with this memory and the rates of an H100."""
    rates = next(gpu for gpu in GPUS if gpu.name == _RATES_OF)
    return Gpu(
        name=f"{memory_gib:g} GiB, rates of {_RATES_OF}",
        memory_gib=memory_gib,
        hbm_bytes_s=rates.hbm_bytes_s,
        nvlink_bytes_s=rates.nvlink_bytes_s,
        peak_flops=rates.peak_flops,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts of one kind. Rates are bytes per second, in one direction."""

    gpu: Gpu
    gpus_per_host: int = 8
    nics: int = 8  # network cards of each host
    nic_bytes_s: float = 50e9  # bandwidth of each card
    pcie_bytes_s: float = 50e9  # bandwidth of each GPU
    host_memory_bytes_s: float = 300e9  # bandwidth of each host
    learner_share: float = 0.4  # share of the peak that a computing rank reaches
    engine_share: float = 0.6  # share of the peak and of the memory's rate that an engine reaches
    engine_base_s: float = 0.005  # part of a decode step without reading and multiplying
    reserve_gib: float = 4.0  # memory of each GPU for CUDA, NCCL and the allocator's gaps

    @property
    def available_bytes(self) -> float:
        """Memory of a GPU that tensors may take."""
        return (self.gpu.memory_gib - self.reserve_gib) * 2**30

    @property
    def network_bytes_s(self) -> float:
        """A GPU's share of its host's NICs."""
        return self.nics * self.nic_bytes_s / self.gpus_per_host

    def hosts(self, gpus: int) -> int:
        """Return the number of hosts with this many GPUs."""
        return -(-gpus // self.gpus_per_host)

    def exchange_s(self, num_bytes: float, group: int) -> float:
        """Return the seconds in which each rank of a group sends this many bytes to the others.

        ``group`` is the span of neighboring ranks. Traffic within a host takes NVLink, the rest the
        NICs.
        """
        if group <= self.gpus_per_host:
            return num_bytes / self.gpu.nvlink_bytes_s
        here = self.gpus_per_host / group
        return num_bytes * (here / self.gpu.nvlink_bytes_s + (1 - here) / self.network_bytes_s)
