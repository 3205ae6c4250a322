"""Print how far our rotary embeddings are from SGLang's, for each of the scaled tiny models.

Usage: engine_rotary FOLDER for the models; prints {model: largest difference} as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch

from slipstream.generators.sglang import cpu
from slipstream.learner.model.rotary import Rotary
from slipstream.wire.models.hf_config import HfConfig, load_hf_config
from tests.support.tiny_models import SCALED, write_tiny_model

POSITIONS = torch.arange(60)


def main(folder: Path) -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # noqa: TID251 SGLang reads it while it is imported
    cpu.prepare()
    with cpu.uncompiled():
        from sglang.srt.layers.rotary_embedding import get_rope

    def difference(name: str, config: HfConfig) -> float:
        rule = SCALED[name].get("rope_scaling") or SCALED[name]["rope_parameters"]
        size, base = config.kv_channels, config.rotary_base
        engine = get_rope(size, size, 256, base, True, rule, torch.float32).cos_sin_cache
        ours = Rotary.of(config, torch.device("cpu")).at(POSITIONS)
        return float((torch.cat((ours.cos, ours.sin), -1)[:, 0] - engine[POSITIONS]).abs().max())

    models = {name: load_hf_config(write_tiny_model(folder / name, name)) for name in SCALED}
    sys.stdout.write(json.dumps({name: difference(name, one) for name, one in models.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
