"""Pure: a run's memory and disk on a host, in bytes, part by part.

P parameters of the policy, f bytes of each: 4 on a CPU (float32), 2 on a GPU (bfloat16). Memory of
GPUs is estimated in `gpu.py`.

    learner on a CPU     learner_rank.py     16 P per replica in float32 and more, as it is divided
    engine on a CPU      4 P + KV            KV: generators.max_cached_tokens tokens
    reward worker        nothing             its functions take what they do: reward.memory_mb
    copies for saving    12 P or 14 P        of a checkpoint, with checkpoint.asynchronous
    versions             3 f P in /dev/shm   slots of the learner's shared memory
    checkpoint           12 P or 14 P        float32 weights and moments; bfloat16 weights besides
"""

from collections.abc import Sequence

from slipstream.deploy.config import RunConfig
from slipstream.deploy.predict.memory.gpu import kv_bytes_per_token
from slipstream.deploy.predict.memory.learner_rank import (
    HOST_OPTIMIZER,
    TENSORS,
    MemoryPart,
    adapter_parameters,
    learner_stages,
    total_bytes,
)
from slipstream.learner.config import LearnerSection
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.wire.models.hf_config import HfConfig
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.settings.sections import CheckpointSection

_FLOAT32, _BFLOAT16 = 4, 2


def host_memory(
    hf: HfConfig,
    config: RunConfig,
    *,
    learner_ranks: int,
    engines: int,
    frozen: Sequence[HfConfig] = (),
    has_critic: bool = False,
) -> list[MemoryPart]:
    """Return the memory of a host for processes that compute on its CPU.

    Args:
        hf: the policy's architecture.
        config: the run's settings.
        learner_ranks: Ranks of the learner that compute on this host's CPU.
        engines: Engines that compute on this host's CPU.
        frozen: additional policies of each replica.
        has_critic: True if a critic is trained.
    """
    generators = config.generators.generators
    cached = generators.max_cached_tokens * kv_bytes_per_token(hf, element_bytes=_FLOAT32)
    parts = [
        *_learner_memory(hf, config, learner_ranks, frozen, has_critic=has_critic),
        MemoryPart(
            "engines' weights",
            _FLOAT32 * (hf.num_parameters + hf.num_tower_parameters) * engines,
            "generators.count",
        ),
        MemoryPart("engines' caches", cached * engines, "generators.max_cached_tokens"),
    ]
    return [part for part in parts if part.num_bytes]


def _learner_memory(
    hf: HfConfig, config: RunConfig, ranks: int, frozen: Sequence[HfConfig], *, has_critic: bool
) -> list[MemoryPart]:
    """Return the memory of this many ranks, those of the largest pipeline stages."""
    learner = config.learner.learner
    stages = learner_stages(hf, config.learner, on_gpu=False, frozen=frozen, has_critic=has_critic)
    stages.sort(key=total_bytes, reverse=True)
    each = learner.ranks // learner.pipeline_parallel
    here = [stages[rank // each] for rank in range(ranks)]
    kinds = {
        "learner": (*TENSORS, HOST_OPTIMIZER),
        "activations": ("activations", "logits", "last hidden states", "one gradient"),
        "frozen policies": ("frozen policies",),
        "critic": ("critic",),
    }
    settings = {"frozen policies": "algo.kl, algo.teacher", "critic": "algo.advantage"}
    return [
        MemoryPart(
            kind,
            sum(part.num_bytes for parts in here for part in parts if part.what in whats),
            settings.get(kind, "learner.ranks"),
        )
        for kind, whats in kinds.items()
    ]


def versions_bytes(hf: HfConfig, *, on_gpu: bool, lora: LoraSection | None = None) -> int:
    """Return the shared memory for versions that the learner hands to the relay."""
    count = hf.num_parameters
    if lora is not None and lora.is_named:
        count = _num_trained(hf, lora)
    return NUM_SLOTS * (_BFLOAT16 if on_gpu else _FLOAT32) * count


def checkpoint_bytes(
    hf: HfConfig, *, on_gpu: bool, has_critic: bool = False, lora: LoraSection | None = None
) -> int:
    """Return the size of one checkpoint."""
    critic = hf.num_parameters if has_critic else 0
    return (14 if on_gpu else 12) * (_num_trained(hf, lora) + critic)


def _num_trained(hf: HfConfig, lora: LoraSection | None) -> int:
    """Return the parameters that a policy trains: all, or those of adapters."""
    if lora is None or not lora.is_on:
        return hf.num_parameters
    return adapter_parameters(hf, LearnerSection(), lora.facts(), 0).count


def copies_memory(
    hf: HfConfig,
    checkpoint: CheckpointSection,
    *,
    on_gpu: bool,
    has_critic: bool = False,
    lora: LoraSection | None = None,
) -> list[MemoryPart]:
    """Return the memory of a learner's host for saving while training continues.

    The ranks of one replica hold it together; all of them may be on this host.
    """
    if not (checkpoint.asynchronous and _saves_during_training(checkpoint)):
        return []
    size = float(checkpoint_bytes(hf, on_gpu=on_gpu, has_critic=has_critic, lora=lora))
    return [MemoryPart("copies for saving", size, "checkpoint.asynchronous")]


def most_checkpoints(checkpoint: CheckpointSection) -> int:
    """Return the largest number of checkpoints on the disk, including an unfinished one."""
    if not _saves_during_training(checkpoint):
        return 1
    return checkpoint.keep_last + checkpoint.keep_best + 1


def _saves_during_training(checkpoint: CheckpointSection) -> bool:
    return bool(checkpoint.every_steps) or checkpoint.keep_best
