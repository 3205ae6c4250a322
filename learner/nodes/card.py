"""Facts that the nodes of a learner must have in common before they train together."""

import json
from importlib.metadata import version as package_version

import msgspec

from slipstream.learner.config import LearnerSettings
from slipstream.wire.models.model_digests import model_digests, short_digest
from slipstream.wire.process.cards import flat

_OF_A_HOST = frozenset({"threads"})  # settings of [learner] that may differ between nodes
_RUN = ("mode", "steps", "group_size", "groups_per_step", "seed")
_BUS = ("bucket_bytes", "parts", "probe_every", "probe_sequences", "probe_tokens")
_PACKAGES = ("torch", "megatron-core")


def facts_of(
    settings: LearnerSettings, *, replays: bool, resumes: bool, device: str
) -> dict[str, str]:
    """Return the facts that all nodes of a learner must have in common, by setting or option.

    Libraries come first: if they differ, nothing else can be relied on. Builds of one release of
    torch understand each other. A value that may hold a password is replaced by its digest.
    """
    facts = {"run.name": settings.run.name}
    facts |= {name: package_version(name).partition("+")[0] for name in _PACKAGES}
    facts["device"] = device
    learner = flat("learner", msgspec.to_builtins(settings.learner))
    first = ("ranks", "ranks_per_node", "tensor_parallel", "pipeline_parallel", "dtype")
    facts |= {f"learner.{name}": learner[f"learner.{name}"] for name in first}
    facts |= {
        f"{part} in run.model": digest for part, digest in model_digests(settings.model).items()
    }
    facts["run.dir with run.name"] = str(settings.run.folder.resolve())
    facts["--replay"] = "given" if replays else "not given"
    facts["--resume"] = "auto" if resumes else "not given"
    facts |= {f"run.{name}": json.dumps(getattr(settings.run, name)) for name in _RUN}
    facts["run.resume_from"] = settings.run.resume_from
    facts |= {k: v for k, v in learner.items() if k.partition(".")[2] not in _OF_A_HOST}
    algo = msgspec.to_builtins(settings.algo)
    facts["[algo.teacher]"] = short_digest(json.dumps(algo.pop("teacher"), sort_keys=True).encode())
    facts |= flat("algo", algo)
    facts |= flat("checkpoint", msgspec.to_builtins(settings.checkpoint))
    evaluation = msgspec.to_builtins(settings.eval)
    facts["eval.file or eval.sets"] = "given" if settings.eval.enabled else "not given"
    facts |= flat("eval", {k: v for k, v in evaluation.items() if k not in {"file", "sets"}})
    bus = settings.weightbus
    facts["weightbus.digests"] = bus.digest_kind  # "auto" depends on weightbus.bulk
    facts |= {f"weightbus.{name}": json.dumps(getattr(bus, name)) for name in _BUS}
    facts["sampling.temperature"] = json.dumps(settings.sampling.temperature)
    return facts
