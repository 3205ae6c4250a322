"""Programs that check branches for a GPU on a machine without one; each is a fresh process."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.support.dependency_calls import Use, uses_in, wrong
from tests.support.tiny_run import ROOT

_SERVER = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
)
_DEFAULTS = (
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "attention_backend",
)
PACKAGES = ("algos", "broker", "deploy", "generators", "learner", "weightbus", "wire")


def uses(library: str) -> Iterator[Use]:
    """Yield the uses of a library in the product."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from uses_in(file, ROOT, frozenset({library}))


def check_names() -> Iterator[str]:
    """Yield what is wrong with our use of torch and Megatron as they are installed."""
    from slipstream.learner.model import device

    for library in ("torch", "megatron"):
        found = list(uses(library))
        yield from filter(None, map(wrong, found))
        yield f"{library}: {len(found)} uses"
        device.prepare()  # after torch was read: it replaces functions for Megatron's sake


def check_flags() -> Iterator[str]:
    """Yield what SGLang reads of an engine on a GPU, and which of its variables it knows."""
    from argparse import ArgumentParser

    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common

    from slipstream.generators.config import generator_settings
    from slipstream.generators.sglang import server, start_order
    from tests.support.blank_model import write_blank_model

    torch.version.cuda = torch.version.cuda or "13.0"
    common.is_cuda.cache_clear()
    before = set(os.environ)  # noqa: TID251 SGLang adds to it
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_blank_model(folder, hidden=64, layers=1)
        for mode in ("retract", "in_place"):
            settings = generator_settings(
                {
                    "run": {"model": str(folder)},
                    "generators": {"device": "cuda", "sglang": {"tp_size": 2}},
                    "weightbus": {"in_flight": mode},
                    "sampling": {"seed_per_sibling": True},
                    "environment": {"function": "environments.py:count", "max_tokens": 64},
                }
            )
            flags = start_order.server_flags(settings, port=1, api_key="0", seed_of="g")
            arguments = server._arguments(flags, parser)
            read = ServerArgs.from_cli_args(parser.parse_args(arguments))
            read.resolve_once()
            graphs = resolved_view(read).cuda_graph_config
            found = {name: getattr(resolved_view(read), name) for name in _DEFAULTS}
            found |= {"decode": graphs.decode.backend, "prefill": graphs.prefill.backend}
            yield f"{mode}: " + " ".join(f"{name}={value}" for name, value in found.items())
            given = start_order.environment_of(settings, folder).keys() - before
    for variable in sorted(one for one in given if one.startswith("SGLANG_")):
        yield f"{variable}: {'known' if hasattr(envs, variable) else 'unknown'}"


def import_server() -> Iterator[str]:
    """Import an engine's server as on a GPU; what no CPU has is in the path as stand-ins."""
    _pretend_to_have_a_gpu()
    from slipstream.generators.sglang import patches, server

    del server  # it corrects SGLang's modules as they are imported
    for name in _SERVER:
        importlib.import_module(name)
    updater = sys.modules[patches._WEIGHT_UPDATER].WeightUpdater
    yield updater.destroy_weights_update_group.__module__
    stand_in = importlib.import_module("sgl_kernel.utils")
    yield f"dependent launches: {stand_in.is_arch_support_pdl()}"
    gemm = importlib.import_module("sglang.kernels.ops.gemm.cutedsl_dual_gemm")
    mode = gemm.DualGemmQuantMode.UNQUANT
    yield f"a GEMM of newer GPUs: {gemm.can_use_dual_gemm(1, 128, 128, mode)}"
    yield from check_flags()


def _pretend_to_have_a_gpu() -> None:
    """Answer as a driver would what modules ask while they are imported."""

    class Properties:
        name = "NVIDIA H100"
        major, minor = 9, 0
        total_memory = 80 << 30
        multi_processor_count = 132
        warp_size = 32

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": Properties.name,
        "get_device_properties": Properties(),
        "mem_get_info": (Properties.total_memory, Properties.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer: answer)


if __name__ == "__main__":
    check = {"names": check_names, "server": import_server}[sys.argv[1]]
    sys.stdout.writelines(f"{line}\n" for line in check())
