"""Ranks of one engine that answer for each other: SGLang's own class, corrected as in an engine.

They are forked after one import, as those of an engine on a CPU are.
"""

import datetime
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from slipstream.generators.sglang import cpu, patches


def main() -> None:
    """Print what each rank answered."""
    folder, world_size = Path(sys.argv[1]), int(sys.argv[2])
    patches.install()
    cpu.prepare()
    with cpu.uncompiled():
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components import weight_updater as module
    ranks = range(1, world_size)
    pids = []
    for rank in ranks:
        if (pid := os.fork()) == 0:
            answers = answers_of(rank, world_size, folder, io_struct, module)
            (folder / f"{rank}.json").write_text(json.dumps(answers))
            os._exit(0)
        pids.append(pid)
    printed = [answers_of(0, world_size, folder, io_struct, module)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    printed += [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
    sys.stdout.write(f"{json.dumps(printed)}\n")


def answers_of(
    rank: int,
    world_size: int,
    folder: Path,
    io_struct: Any,  # noqa: ANN401 modules of SGLang
    module: Any,  # noqa: ANN401
) -> list[tuple[bool, str]]:
    """Return whether a rank joined a group, and what it said: alone, and with one that fails."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/ranks",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=600),
    )
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    module.get_parallel = lambda: SimpleNamespace(tp_group=group)
    failing = -1

    def joined(_request: object) -> tuple[bool, str]:
        return (False, "no route") if rank == failing else (True, "joined")

    manager = module.SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(init_weights_update_group=joined),
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_named: True,
        is_fully_idle=lambda: True,
    )
    request = io_struct.InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1",
        master_port=1,
        rank_offset=1,
        world_size=world_size + 1,
        group_name="group",
    )
    answers = []
    for failing in (-1, world_size - 1, 0):  # noqa: B007 read by ``joined``
        output = manager.init_weights_update_group(request)
        answers.append((output.success, output.message))
    return answers


if __name__ == "__main__":
    main()
