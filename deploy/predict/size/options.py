"""Options of commands that predict for absent hardware: `plan`, `simulate`."""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.predict.laws.gpus import Cluster, gpu_named, gpu_of
from slipstream.deploy.predict.laws.shapes import shape_folder, shipped_names
from slipstream.learner.model.division import with_vision
from slipstream.wire.errors import ConfigError
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from slipstream.wire.settings.load import load_table
from slipstream.wire.settings.sections import SamplingSection, model_folder

_SHARES = frozenset({"mfu", "engine_share", "slow_share", "useless_share"})  # at most 1
_MAY_BE_ZERO = frozenset(
    {
        "host_gb",
        "reserve_gib",
        "engine_base_ms",
        "spread",
        "engine_mtbf_h",
        "kl_per_lag",
        "slow_share",
        "seed",
        "reward_s",
        "useless_share",
    }
)
_LEAST = 1e-9


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model, and the mean lengths of prompts and responses."""
    parser.add_argument(
        "--model",
        help="instead of run.model: a folder with config.json, such a file, or one of "
        + ", ".join(shipped_names()),
    )
    for name in ("prompt", "response"):
        text = f"tokens of a {name}, default half of the most"
        parser.add_argument(f"--mean-{name}", type=float, help=text)


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the GPUs, their hosts and links, and the shares of a data sheet's rates."""
    add_count, add_number = (partial(parser.add_argument, type=kind) for kind in (int, float))
    text = 'a name such as "H100", or GiB; default deploy.gpu_memory_gib'
    parser.add_argument("--gpu", help=text)
    add_count("--gpus-per-node", help="GPUs of a host; default deploy.gpus_per_host, or 8")
    add_count("--nics", default=8, help="network cards of each host, default 8")
    add_number("--nic-gb-s", default=50.0, help="GB/s of each, default 50")
    add_number("--pcie-gb-s", default=50.0, help="GB/s of each GPU, default 50")
    text = "share of the peak while a rank of the learner computes, default 0.4"
    add_number("--mfu", default=0.4, help=text)
    text = "share of peak and memory's rate that an engine reaches, default 0.6"
    add_number("--engine-share", default=0.6, help=text)
    text = "ms of a decode step beside reading and multiplying, default 5"
    add_number("--engine-base-ms", default=5.0, help=text)


def cluster_of(arguments: argparse.Namespace, config: RunConfig, *, reserve_gib: float) -> Cluster:
    """Return the hosts that the options describe; ``reserve_gib`` of each GPU hold no tensors.

    Raises:
        ConfigError: the GPU is unknown, or smaller than the reserve.
    """
    named = arguments.gpu
    gpu = gpu_named(named) if named else gpu_of(config.deploy.gpu_memory_gib)
    if reserve_gib >= gpu.memory_gib:
        raise ConfigError(
            f"--reserve-gib is {reserve_gib:g}: expected less than the {gpu.memory_gib:g} GiB of a "
            "GPU (--gpu)"
        )
    return Cluster(
        gpu=gpu,
        gpus_per_host=arguments.gpus_per_node or config.deploy.gpus_per_host or 8,
        nics=arguments.nics,
        nic_bytes_s=arguments.nic_gb_s * 1e9,
        pcie_bytes_s=arguments.pcie_gb_s * 1e9,
        learner_share=arguments.mfu,
        engine_share=arguments.engine_share,
        engine_base_s=arguments.engine_base_ms / 1e3,
        reserve_gib=reserve_gib,
    )


def run_and_shape(arguments: argparse.Namespace) -> tuple[RunConfig, HfConfig]:
    """Return the settings and the architecture of the model; its weights are not needed.

    Raises:
        ConfigError: the settings cannot be used, or the model does not exist.
    """
    overrides = list(arguments.overrides)
    if arguments.model is not None:
        overrides.append(f"run.model={shape_folder(arguments.model)}")
    config = run_config(load_table(arguments.config, overrides))
    hf = with_vision(load_hf_config(model_folder(config.run)), config.learner.learner)
    return config, hf


def mean_tokens(arguments: argparse.Namespace, sampling: SamplingSection) -> tuple[float, float]:
    """Return the mean tokens of a prompt and of a response.

    Raises:
        ConfigError: a mean is more than [sampling] allows.
    """
    means = []
    for name in ("prompt", "response"):
        mean: float | None = getattr(arguments, f"mean_{name}")
        most: int = getattr(sampling, f"max_{name}_tokens")
        if mean is not None and mean > most:
            raise ConfigError(
                f"--mean-{name} is {mean:g}: expected at most {most:,} (sampling.max_{name}_tokens)"
            )
        means.append(mean or most / 2)
    return means[0], means[1]


def policies_beside(config: RunConfig) -> tuple[Sequence[HfConfig], bool]:
    """Return the frozen policies that read each trajectory, and whether a critic is trained."""
    from slipstream.learner.training.algorithm import algorithm_of, frozen_policies  # torch

    algorithm = algorithm_of(config.learner)
    return frozen_policies(algorithm, config.learner), algorithm.choice.needs_values


def refuse_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no option accepts.

    Raises:
        ConfigError: a number is negative, 0, infinite or NaN, or a share above 1.
    """
    for name, value in vars(arguments).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 0.0 if name in _MAY_BE_ZERO else _LEAST
        most = 1.0 if name in _SHARES else math.inf
        if not (least <= value <= most and math.isfinite(value)):
            bound = "of at most 1 " if most == 1.0 else ""
            zero = ", or 0" if least == 0.0 else ""
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value:g}: expected a number {bound}above 0{zero}"
            )
