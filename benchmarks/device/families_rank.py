"""A learner of one rank: logprobs of a model of each family, before and after a step.

Usage: families_rank MODELS_FOLDER OUT_FILE DTYPE
It runs where CUDA_VISIBLE_DEVICES leaves it. What failed is in the file beside what did not.
"""

import json
import sys
import traceback
from pathlib import Path

import msgspec
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.device.learner_rank import settings_of
from slipstream.learner.batches.packing import pack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from slipstream.wire.settings.lora import LoraSection
from tests.support.ranks.policy import random_outcomes, train_siblings, whole_plan

ADAPTERS = "qwen3 with adapters"


def main(models: Path, file: Path, dtype: str) -> None:
    device.prepare()
    device.set_threads(1)
    from slipstream.learner.model.topology import destroy_topology, init_topology
    from slipstream.learner.starting_policy import build_policy

    topology = init_topology(rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=60.0)
    sequences = train_siblings()
    batch = pack(sequences, device.device(), shares_prompts=True)
    plan = whole_plan(sequences)
    found: dict[str, dict[str, object]] = {}
    for name in [*sorted(path.name for path in models.iterdir()), ADAPTERS]:
        settings = settings_of(models / name.split()[0], dtype, {})
        if name == ADAPTERS:
            settings = msgspec.structs.replace(settings, lora=LoraSection(rank=4))
        try:
            algorithm = algorithm_of(settings)
            policy = build_policy(settings, algorithm, topology)
            before = policy.proximal([batch])[0].logprobs.tolist()
            data = random_outcomes(sequences, step=5)
            figures, _ = train_step(policy, [[batch]], [plan], data, algorithm, PhaseClock())
            after = policy.proximal([batch])[0].logprobs.tolist()
            found[name] = {"before": before, "after": after, "norm": figures["policy/grad_norm"]}
        except Exception as error:  # noqa: BLE001 the next family may work
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        file.write_text(json.dumps(found))
    destroy_topology()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
