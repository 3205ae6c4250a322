"""What a node says of itself when the nodes meet, and why two of them cannot train together."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version as package_version
from pathlib import Path

import msgspec

from slipstream.learner.config import LearnerSettings

_OF_A_HOST = frozenset({"threads"})  # of [learner]: may differ between nodes
_RUN = ("mode", "steps", "group_size", "groups_per_step", "seed")
_BUS = ("bucket_bytes", "parts", "probe_every", "probe_sequences", "probe_tokens")
_PACKAGES = ("torch", "megatron-core")
_MOST_DIFFERENCES = 3  # in one line
_DIGEST = 12  # hexadecimal digits of a fact that is too long, or not for others, to be shown
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file of weights


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One process that came as a node."""

    node: int
    host: str
    pid: int
    facts: dict[str, str]  # what every node must have in common, in the order of comparison


def facts_of(
    settings: LearnerSettings, *, replays: bool, resumes: bool, device: str
) -> dict[str, str]:
    """Return what every node of a learner must have in common, by setting or option.

    Libraries first: where they differ nothing else can be relied on. Builds of one release of
    torch understand each other. What may hold a password is only a digest.
    """
    facts = {"run.name": settings.run.name}
    facts |= {name: package_version(name).partition("+")[0] for name in _PACKAGES}
    facts["device"] = device
    learner = _flat("learner", msgspec.to_builtins(settings.learner))
    first = ("ranks", "ranks_per_node", "tensor_parallel", "pipeline_parallel", "dtype")
    facts |= {f"learner.{name}": learner[f"learner.{name}"] for name in first}
    facts |= {f"{part} in run.model": one for part, one in model_digests(settings.model).items()}
    facts["run.dir with run.name"] = str(settings.run.folder.resolve())
    facts["--replay"] = "given" if replays else "not given"
    facts["--resume"] = "auto" if resumes else "not given"
    facts |= {f"run.{name}": json.dumps(getattr(settings.run, name)) for name in _RUN}
    facts["run.resume_from"] = settings.run.resume_from
    facts |= {k: v for k, v in learner.items() if k.partition(".")[2] not in _OF_A_HOST}
    algo = msgspec.to_builtins(settings.algo)
    facts["[algo.teacher]"] = _digest(json.dumps(algo.pop("teacher"), sort_keys=True).encode())
    facts |= _flat("algo", algo)
    facts |= _flat("checkpoint", msgspec.to_builtins(settings.checkpoint))
    evaluation = msgspec.to_builtins(settings.eval)
    facts["eval.file or eval.sets"] = "given" if settings.eval.enabled else "not given"
    facts |= _flat("eval", {k: v for k, v in evaluation.items() if k not in {"file", "sets"}})
    bus = settings.weightbus
    facts["weightbus.digests"] = bus.digest_kind  # with auto it depends on weightbus.bulk
    facts |= {f"weightbus.{name}": json.dumps(getattr(bus, name)) for name in _BUS}
    facts["sampling.temperature"] = json.dumps(settings.sampling.temperature)
    return facts


def model_digests(folder: Path) -> dict[str, str]:
    """Return digests of a model folder's config.json and weights."""
    config = _digest((folder / "config.json").read_bytes())
    return {"config.json": config, "weights": _weights_digest(folder)}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return in what another node differs from node 0, the most telling first; empty if in nothing.

    Args:
        ours: of node 0.
        theirs: of the other node.
    """
    names = [*ours, *(name for name in theirs if name not in ours)]
    found = [
        f"{name} is {theirs.get(name, 'unknown') or 'not set'} there, "
        f"expected {ours.get(name, 'nothing') or 'not set'}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _flat(name: str, value: object) -> dict[str, str]:
    """Return the values of a section under dotted names."""
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for key in sorted(value):
            flat |= _flat(f"{name}.{key}", value[key])
        return flat
    return {name: value if isinstance(value, str) else json.dumps(value)}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST]


def _weights_digest(folder: Path) -> str:
    """Return a digest of names, sizes and samples: it takes no time and tells models apart."""
    state = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:_DIGEST]
