"""Write the golden bytes of today's wire revision: python -m tests.golden.make_wire

For a new revision only, or for a kind that is new in one that was never released. Bytes that
are there already and would change are left alone and named; to change them, raise WIRE_REVISION.
"""

import json
import sys
from pathlib import Path

import msgspec

from slipstream.wire.messages.broker import WIRE_REVISION
from slipstream.wire.messages.codec import encode
from tests.support.wire_samples import FAMILIES

FOLDER = Path(__file__).parent / "wire"
TODAY = FOLDER / f"revision-{WIRE_REVISION}"
READABLE = "readable.json"


def golden_files() -> dict[str, bytes]:
    """Return the bytes of every sample by file name, FAMILY.KIND.msgpack."""
    return {
        f"{family}.{name}.msgpack": encode(sample)
        for family, samples in FAMILIES.items()
        for name, sample in samples.items()
    }


def readable() -> str:
    """Return all samples as a person reads them."""
    found = {
        f"{family}.{name}": msgspec.to_builtins(sample, str_keys=True)
        for family, samples in FAMILIES.items()
        for name, sample in samples.items()
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write what is missing; return how many files hold other bytes."""
    TODAY.mkdir(parents=True, exist_ok=True)
    others = 0
    for name, data in golden_files().items():
        path = TODAY / name
        if not path.exists():
            path.write_bytes(data)
        elif path.read_bytes() != data:
            sys.stderr.write(f"{path} holds other bytes: raise WIRE_REVISION (docs/wire.md)\n")
            others += 1
    if not others:
        (TODAY / READABLE).write_text(readable())
    return others


if __name__ == "__main__":
    sys.exit(main())
