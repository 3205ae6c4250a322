"""A learner of one rank: two steps, a checkpoint, a version in the weights' memory.

Usage: learner_rank MODEL_FOLDER WORK_FOLDER DTYPE [CHECKPOINT_OF]
It runs where CUDA_VISIBLE_DEVICES leaves it. Writes WORK_FOLDER/report.json; with CHECKPOINT_OF,
the work folder of another rank, it only loads what that one has saved.
"""

import hashlib
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slipstream.algos.section import AlgoSection
from slipstream.learner.batches.packing import pack
from slipstream.learner.config import LearnerSection, LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.files.checkpoints import FORMAT_REVISION, CheckpointInfo
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.sections import RunSection, SamplingSection
from tests.support.ranks.host_reads import counting
from tests.support.ranks.policy import random_outcomes, train_siblings, whole_plan
from tests.support.ranks.sequence_parallel import ALGO

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology
    from slipstream.learner.training.policy import Policy

_TIMEOUT_S = 60.0
_ALGORITHMS: dict[str, dict[str, object]] = {"default": {}, "critic": ALGO}


def settings_of(model: Path, dtype: str, algo: dict[str, object]) -> LearnerSettings:
    # A large epsilon: Adam amplifies rounding where the second moment is tiny.
    return LearnerSettings(
        run=RunSection(model=str(model)),
        learner=LearnerSection(lr=1e-2, adam_epsilon=1e-3, dtype=dtype),  # type: ignore[arg-type]
        algo=AlgoSection(**algo),  # type: ignore[arg-type]  # TOML's types
        weightbus=WeightBusSection(),
        sampling=SamplingSection(max_response_tokens=32),
    )


def digest(model: torch.nn.Module) -> str:
    """Return a digest of a model's parameters, wherever they are."""
    whole = hashlib.sha256()
    for _, tensor in sorted(model.named_parameters()):
        whole.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def info_of(policy: "Policy", settings: LearnerSettings) -> CheckpointInfo:
    from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash

    return CheckpointInfo(
        format_revision=FORMAT_REVISION,
        run_name="a",
        version=PolicyVersion(1, 1),
        saved_at="",
        model=str(settings.model),
        architecture=architecture_of(policy.model.hf_config),
        parameters=parameters_hash(policy.model),
        dtype=dtype_name(policy.model),
        ranks=1,
        tensor_parallel=1,
        packages={},
        has_digests=True,
    )


def writes_what_it_holds(policy: "Policy", topology: "Topology", exported: Path) -> bool:
    """Write a version as a publish does; return whether its bytes are those of the export."""
    from slipstream.learner.publish.weight_writer import WeightWriter

    writer = WeightWriter(policy.model, topology, bucket_bytes=64 * 1024)
    try:
        assert writer.write(1) == "", "a parameter is not finite"  # noqa: S101
        memory = SharedSlots.open(writer.paths, writer.layout)
        views = tensor_views(writer.layout, memory.slot(1))
        held = load_file(exported / "model.safetensors")
        same = views.keys() == held.keys() and all(
            torch.equal(views[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
            for name, tensor in held.items()
        )
        del views
        memory.close()
    finally:
        writer.close()
    return same


def main(model: Path, work: Path, dtype: str, other: Path | None) -> None:
    device.prepare()
    device.set_threads(1)
    from slipstream.learner.checkpoints.files import Save, prepare_folder
    from slipstream.learner.checkpoints.loading import load_checkpoint
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy

    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=_TIMEOUT_S)
    work.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {"device": str(device.device())}
    if other is not None:
        settings = settings_of(model, dtype, {})
        policy = build_policy(settings, algorithm_of(settings), topology)
        (saved,) = (other / "checkpoints").iterdir()
        report["fresh"] = digest(policy.model)
        load_checkpoint(policy, topology, saved, info_of(policy, settings))
        report["loaded"] = digest(policy.model)
        (work / "report.json").write_text(json.dumps(report))
        destroy_topology()
        return
    sequences = train_siblings()
    batch = pack(sequences, device.device(), shares_prompts=True)
    plan = whole_plan(sequences)
    for name, algo in _ALGORITHMS.items():
        settings = settings_of(model, dtype, algo)
        algorithm = algorithm_of(settings)
        policy = build_policy(settings, algorithm, topology)
        before = policy.proximal([batch])[0].logprobs
        data = random_outcomes(sequences, step=5)
        figures, _ = train_step(policy, [[batch]], [plan], data, algorithm, PhaseClock())
        reads, calls, before_update = (Counter[str]() for _ in range(3))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            with counting(reads, calls, before_update):
                train_step(policy, [[batch]], [plan], data, algorithm, PhaseClock())
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
        report[name] = {
            "logprobs": before.tolist(),
            "figures": figures,
            "trained": policy.proximal([batch])[0].logprobs.tolist(),
            "reads": sum(reads.values()),
            "waits": sum("called a synchronizing" in str(one.message) for one in seen),
            "where": {f"{Path(one.filename).name}:{one.lineno}": 1 for one in seen},
        }
        if name == "default":
            exported = work / "model"
            save_hf_folder(policy.model, exported, model)
            report["writes"] = writes_what_it_holds(policy, topology, exported)
            prepare_folder(work / "checkpoints")
            info = info_of(policy, settings)
            saved = work / "checkpoints"
            Save(policy, topology, saved, info, lambda: b"ledger", timeout_s=900.0).wait()
            report["saved"] = digest(policy.model)
    (work / "report.json").write_text(json.dumps(report))
    destroy_topology()


if __name__ == "__main__":
    _model, _work, _dtype, *_other = sys.argv[1:]
    main(Path(_model), Path(_work), _dtype, Path(_other[0]) if _other else None)
