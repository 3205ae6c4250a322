"""Program of one SGLang server, started by a generator's agent; settings come through stdin.

The only module that imports sglang. On a CPU its processes are forked after one import instead
of spawned with three, which halves the start-up time; forking after CUDA started does not work,
so a GPU server spawns as usual.
"""

import argparse
import gc
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from slipstream.generators.sglang import patches, policy_model
from slipstream.generators.sglang.device_defaults import Flag
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.processes import die_with_parent

_STORE_S = 60.0  # limit of waits for keys, which this process never makes

try:
    patches.install()
except ConfigError as refused:
    raise SystemExit(str(refused)) from refused


def main() -> None:
    """Read one JSON object from stdin and serve until killed."""
    order = json.loads(sys.stdin.read())
    die_with_parent(order["parent_pid"])
    on_cpu = order["device"] == "cpu"
    gc.disable()  # saves a quarter of the imports' time: imported objects live to the end
    from slipstream.generators.sglang import (
        cpu,
        cpu_adapter_batches,
    )  # torch takes seconds to import

    if on_cpu:
        cpu.prepare()
        original = multiprocessing.set_start_method

        def set_start_method(_method: str | None, *, force: bool = False) -> None:
            """SGLang requests ``spawn`` when it starts; on a CPU it gets ``fork``."""
            del force
            original("fork", force=True)

        multiprocessing.set_start_method = set_start_method  # type: ignore[assignment]
    flags = order["flags"]
    _offer_one_model(Path(flags["model_path"]))
    with cpu.uncompiled() if on_cpu else nullcontext():
        from sglang.srt.server_args import ServerArgs, prepare_server_args

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        argv = _arguments(flags, parser)
        if order.get("only_check"):
            return
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints import http_server  # noqa: F401 slow: before the fork
        from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
    gc.freeze()
    gc.enable()
    if on_cpu:
        cpu.take_sinks()
        cpu.batch_decode_attention()
        cpu.extend_without_prefix_queries()
        cpu.widen_output_layer_by_blocks()
        cpu.allocate_without_cuda()
        if flags.get("enable_lora"):
            cpu.without_pinned_memory()
            cpu_adapter_batches.batch_adapters()
    store = _open_store(order["store"]) if "store" in order else None
    run_server(prepare_server_args(argv))
    del store


def _open_store(order: Mapping[str, Any]) -> object:
    """Open the store where the ranks of an engine on several hosts meet; it ends with this process.

    By itself SGLang's first rank would open one on every interface of this host.
    """
    from slipstream.weightbus.net.rendezvous import store_on

    listener = socket.socket(fileno=order["descriptor"])
    return store_on(listener, order["host"], world_size=None, timeout_s=_STORE_S)


def _offer_one_model(folder: Path) -> None:
    """Let SGLang import only the policy's model, which saves seconds of every start."""
    try:
        (architecture,) = json.loads((folder / "config.json").read_bytes())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # SGLang reports the error
    # A user may have excluded the policy's own module in favor of a substitute in SGLang.
    if not isinstance(architecture, str) or "SGLANG_DISABLED_MODEL_ARCHS" in os.environ:  # noqa: TID251
        return
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", policy_model.__name__)  # noqa: TID251
    os.environ[patches.ARCHITECTURE_VARIABLE] = architecture  # noqa: TID251 for its children


def _arguments(flags: Mapping[str, Flag], parser: argparse.ArgumentParser) -> list[str]:
    """Return SGLang's command line; unknown settings are refused before the slow imports.

    Some options have other names than their settings.
    """
    options = {action.dest: action.option_strings for action in parser._actions}
    argv: list[str] = []
    for name, value in flags.items():
        if not options.get(name):
            raise SystemExit(f"generators.sglang.{name} is not a setting of this SGLang")
        flag = options[name][0]
        if value is True:
            argv.append(flag)
        elif isinstance(value, list):
            argv += [flag, *value]
        elif value is not False:
            argv += [flag, str(value)]
    return argv


if __name__ == "__main__":
    os.setsid()
    try:
        main()
    except ConfigError as refused:
        raise SystemExit(str(refused)) from refused
