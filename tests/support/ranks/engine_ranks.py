"""Ranks of one engine that answer for each other: SGLang's own class, corrected as in an engine."""

import datetime
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from slipstream.generators.sglang import cpu, patches


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    patches.install()
    cpu.prepare()
    with cpu.uncompiled():
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components import weight_updater as module
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
        answers.append([output.success, output.message])
    sys.stdout.write(f"{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
