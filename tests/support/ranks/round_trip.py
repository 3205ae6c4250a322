"""One rank of a learner that loads models, exports them and publishes them.

Usage: round_trip MODELS_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON NAME ...
Models are folders of MODELS_FOLDER. Writes WORK_FOLDER/RANK.json, of rank 0 by name which tensors
came out otherwise, and exports each to WORK_FOLDER/NAME.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.published_parts import written_tensors
from tests.support.ranks.program import finish, join_ranks, run
from tests.support.ranks.run import section_of


def same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, *names: str) -> None:
    learner = section_of(layout)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.weights.hf_weights import (
        export_hf_weights,
        load_hf_weights,
        save_hf_folder,
    )
    from slipstream.learner.publish.weight_writer import WeightWriter
    from slipstream.wire.models.hf_config import load_hf_config, name_alone

    report = {}
    for name in names:
        model = build_model(
            load_hf_config(folder / name), dtype=torch.float32, extra={}, learner=learner
        )
        load_hf_weights(model, folder / name)
        shapes = model.hf_config.tensor_shapes
        stored = load_file(folder / name / "model.safetensors").items()
        original = {name_alone(key): value for key, value in stored}
        original = {key: value for key, value in original.items() if key in shapes}
        exported = dict(export_hf_weights(model))
        save_hf_folder(model, work / name, folder / name)
        writer = WeightWriter(model, topology, bucket_bytes=4096)
        assert not writer.write(1)
        dist.barrier()
        if rank == 0:
            views = written_tensors(writer, 1)
            report[name] = {
                "missing": sorted(original.keys() - exported.keys()),
                "other": [k for k, v in exported.items() if not same(v, original.get(k))],
                "published otherwise": [
                    k for k, v in original.items() if not same(v, views.get(k))
                ],
            }
        dist.barrier()
        writer.close()
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
