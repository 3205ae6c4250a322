"""Pure: what GPUs are, from their makers' data sheets."""

from dataclasses import dataclass

from slipstream.learner.model.flops import peak_tflops_of
from slipstream.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes per second
    flops: float  # per second, of dense matrices in bfloat16


# Memory in GB and bandwidth in TB/s, from NVIDIA's data sheets; FLOP/s are those of MFU.
_SHEETS = {
    "H100": (80, 3.35),
    "H100 NVL": (94, 3.9),
    "H100 PCIe": (80, 2.0),
    "H200": (141, 4.8),
    "H800": (80, 3.35),
    "H20": (96, 4.0),
    "B200": (180, 8.0),
    "GB200": (186, 8.0),
    "A100": (80, 2.039),
    "L40S": (48, 0.864),
}
GPUS = tuple(_SHEETS)


def gpu_of(name: str, setting: str) -> Gpu:
    """Return a kind of GPU by its name.

    Raises:
        ConfigError: there is no such; names ``setting``.
    """
    if name not in _SHEETS:
        raise ConfigError(f"{setting} is {name!r}, expected one of {', '.join(GPUS)}")
    memory, bandwidth = _SHEETS[name]
    peak = peak_tflops_of(name)
    if peak is None:
        raise ConfigError(f"{setting} is {name!r}, whose operations per second are not known")
    return Gpu(name, memory * 1e9, bandwidth * 1e12, peak * 1e12)
