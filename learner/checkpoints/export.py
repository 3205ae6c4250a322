"""Turns a checkpoint of any layout into a Hugging Face or PEFT folder, on one CPU.

Run it as a program: ``python -m slipstream.learner.checkpoints.export CHECKPOINT OUT``.
"""

import argparse
import shutil
import sys
from pathlib import Path

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.files.fetched import Fetch, default_cache, found_model, with_tokenizer
from slipstream.wire.process.command_line import run_role
from slipstream.wire.process.logs import start_logging


def export_checkpoint(checkpoint: Path, out: Path, *, merged: bool = False) -> None:
    """Write the weights of a checkpoint, with config and tokenizer of the original model.

    A checkpoint of adapters is written as adapters, in PEFT's format, unless ``merged``. An
    existing folder ``out`` is replaced. Call it after ``device.prepare()``, in a process without a
    topology.

    Raises:
        ConfigError: no checkpoint, or the original model is gone or has changed.
    """
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in torch's stubs

    from slipstream.learner.checkpoints.loading import load_weights
    from slipstream.learner.model.adapters.lora import add_adapters
    from slipstream.learner.model.adapters.peft import hash_of_base, save_adapter
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.model.weights.hf_weights import load_hf_weights, save_hf_folder
    from slipstream.wire.models.hf_config import load_hf_config

    info = read_checkpoint_info(checkpoint)
    fetch = Fetch(info.model, f"the model of {checkpoint}", default_cache(), info.content)
    source = found_model(fetch, with_weights=info.adapters is not None)
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} was trained from {source}, which is gone: its config.json and "
            "tokenizer are needed"
        )
    hf = load_hf_config(source)
    if hf.may_keep:
        source = found_model(fetch, with_weights=True)
    source = with_tokenizer(source, fetch.cache, fetch.setting)
    init_topology(rank=0, world_size=1, store=HashStore(), seed=0, timeout_s=300.0)
    try:
        if info.architecture.get("trains_vision"):
            hf = msgspec.structs.replace(hf, trains_vision=True)
        model = build_model(hf, dtype=getattr(torch, info.dtype), extra={})
        if info.adapters is not None:
            facts = msgspec.structs.replace(info.adapters, base=hash_of_base(source))
            load_hf_weights(model, source, f"the model of {checkpoint}")
            add_adapters(model, facts, seed=0)
        load_weights(model, checkpoint, info)
        if info.adapters is not None and not merged:
            save_adapter(model, out, info.model)
        else:
            save_hf_folder(model, out, source)
    finally:
        destroy_topology()


def main() -> int:
    """Parse and write."""
    parser = argparse.ArgumentParser(
        prog="slipstream.learner.checkpoints.export", description=__doc__
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--of", type=Path, help="original of the checkpoint, a copy to be removed")
    parser.add_argument("--merged", action="store_true", help="add adapters to the weights")
    arguments = parser.parse_args()
    start_logging("export")

    def body() -> int:
        from slipstream.learner.model import device

        device.prepare()
        export_checkpoint(arguments.checkpoint, arguments.out, merged=arguments.merged)
        step = read_checkpoint_info(arguments.checkpoint).step
        sys.stdout.write(f"wrote {arguments.out}: {name}, step {step}\n")
        return 0

    name = arguments.of or arguments.checkpoint
    try:
        return run_role(body)
    finally:
        if name != arguments.checkpoint:
            shutil.rmtree(arguments.checkpoint, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
