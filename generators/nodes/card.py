"""Facts that the nodes of an engine must have in common before its ranks meet."""

import json
from importlib.metadata import version

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.start_order import server_flags
from slipstream.wire.messages.broker import WIRE_REVISION
from slipstream.wire.models.model_digests import model_digests
from slipstream.wire.models.tokenizer_hash import tokenizer_hash

_PACKAGES = ("sglang", "torch")
_OF_A_HOST = frozenset({"model_path", "host", "port", "api_key"})  # SGLang's per-host settings


def facts_of(settings: GeneratorSettings, name: str) -> dict[str, str]:
    """Return the facts that every node of an engine must have in common, by setting or option.

    Libraries come first: if they differ, no other fact is reliable. SGLang's own settings come
    last: they follow from ours and from the device.
    """
    generators = settings.generators
    facts = {"--name": name, "run.name": settings.run.name, "wire revision": str(WIRE_REVISION)}
    facts |= {package: version(package).partition("+")[0] for package in _PACKAGES}
    facts["generators.device"] = settings.device
    facts["generators.dtype"] = settings.dtype
    facts["generators.nodes"] = str(generators.nodes)
    facts["generators.sglang.tp_size"] = str(generators.num_ranks)
    facts |= {
        f"{part} in run.model": digest for part, digest in model_digests(settings.model).items()
    }
    facts["tokenizer in run.model"] = tokenizer_hash(settings.model)
    facts["run.seed"] = str(settings.run.seed)
    facts["sampling.seed_per_sibling"] = json.dumps(settings.sampling.seed_per_sibling)
    facts["weightbus.in_flight"] = settings.weightbus.in_flight
    for flag, value in server_flags(settings, port=0, api_key="", seed_of=name).items():
        if flag not in _OF_A_HOST:
            setting = "generators.sglang." if flag in generators.sglang else "SGLang's "
            facts[f"{setting}{flag}"] = json.dumps(value)
    return facts
