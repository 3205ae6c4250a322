"""Print how much of a received version a rank maps while it copies its rows, by SGLang's reader.

Usage: engine_rows FOLDER NUM_RANKS; prints {"mapped": bytes, "own": bytes, "all": bytes} as JSON.
"""

import json
import sys
from pathlib import Path

from sglang.srt.model_loader import weight_utils as engine

from slipstream.wire.models.model_files import WEIGHTS


def mapped_bytes(file: Path) -> int:
    """Return the bytes of a file's mappings that this process has touched."""
    counting, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            counting = str(file) in line
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def main(folder: Path, num_ranks: int) -> dict[str, int]:
    mapped = own = whole = 0
    file = (folder / WEIGHTS).resolve()
    for _, tensor in engine.safetensors_weights_iterator([str(folder / WEIGHTS)]):
        rows = tensor.narrow(0, 0, len(tensor) // num_ranks).clone()
        own, whole = own + rows.nbytes, whole + tensor.nbytes
        mapped = max(mapped, mapped_bytes(file))
    return {"mapped": mapped, "own": own, "all": whole}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
