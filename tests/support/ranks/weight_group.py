"""A relay's end and SGLang's own end of weight groups with NCCL's manners, as two processes.

SGLang's class is the real one, corrected as in an engine. Each end prints what happened as JSON.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.generators.sglang import cpu, patches
from slipstream.weightbus.net import groups
from slipstream.weightbus.relay.transports.collective import EngineGroup
from slipstream.wire.errors import PublishError
from tests.support.bus import nccl_manners
from tests.support.waiting import until

TIMEOUT_S = 15.0
SENT = torch.arange(8, dtype=torch.float32)


def relay(folder: Path) -> dict[str, str]:
    """Return what came of groups without a peer, with one, and of one that was left."""
    found = {}
    for name, world_size in (("absent", 3), ("whole", 2)):
        await_mark(folder, f"{name} is next")  # no deadline runs while the other end imports
        group = EngineGroup(name, host="127.0.0.1", world_size=world_size, timeout_s=TIMEOUT_S)
        mark(folder, name, str(group.port))
        try:
            group.join("gloo")
            found[name] = "joined"
        except PublishError as error:
            found[name] = str(error)
            threading.Thread(target=group.close, daemon=True).start()
    await_mark(folder, "receives")
    joined = group._group
    assert joined is not None
    groups.broadcast(SENT.view(torch.uint8), joined, timeout_s=TIMEOUT_S)
    await_mark(folder, "receives again")
    group.close()
    return found


def engine(folder: Path) -> dict[str, str]:
    """Return what SGLang answered."""
    patches.install()
    cpu.prepare()
    with cpu.uncompiled():
        from sglang.srt.model_executor.model_runner_components import weight_updater as module
    dist.init_process_group("gloo", init_method=f"file://{folder}/own", rank=0, world_size=1)
    updater = module.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: None,
        update_model_fields=lambda **_named: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
    found = {}
    for name, world_size in (("absent", 3), ("whole", 2)):
        mark(folder, f"{name} is next")
        port = int(await_mark(folder, name))
        place = ("127.0.0.1", port, 1, world_size, name, nccl_manners.NAME)
        _, found[name] = updater.init_weights_update_group(*place)
    found["groups"] = ", ".join(updater._model_update_group)

    def receive() -> list[tuple[str, torch.Tensor]]:
        received: list[tuple[str, torch.Tensor]] = updater.receive_weights_from_distributed(
            names=["a", "b"],
            dtypes=["float32", "float32"],
            shapes=[(2,), (2, 3)],
            group_name="whole",
            load_format="flattened_bucket",
        )
        return received

    mark(folder, "receives")
    found["received"] = str([tensor.tolist() for _, tensor in receive()])
    mark(folder, "receives again")
    try:
        receive()
        found["after the relay left"] = "received"
    except PublishError as error:
        found["after the relay left"] = str(error)
    _, found["left"] = updater.destroy_weights_update_group("whole")
    return found


def mark(folder: Path, name: str, text: str = "-") -> None:
    """Let the other end pass ``await_mark``."""
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)


def await_mark(folder: Path, name: str) -> str:
    """Wait for the other end's mark and return its text."""
    until((folder / name).exists, f"no mark {name}")
    return (folder / name).read_text()


def main() -> None:
    end, folder = sys.argv[1], Path(sys.argv[2])
    os.environ[patches.GROUP_TIMEOUT_VARIABLE] = str(TIMEOUT_S)  # noqa: TID251 as of an engine
    nccl_manners.install()
    found = (relay if end == "relay" else engine)(folder)
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # around threads that are still inside torch


if __name__ == "__main__":
    main()
