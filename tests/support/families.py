"""Tiny random models of every family, as transformers makes and writes them.

Usage: families FOLDER FAMILY [KEY=JSON ...]
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.family_models import IMAGE_TOKEN, MODELS, PROCESSOR, SHAPE
from tests.support.ranks.run import outputs, start


def write_family(folder: Path, name: str, **changes: object) -> Path:
    """Write a model in a process of its own; changes are of its config.json."""
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    outputs([start(folder.parent, "support.families", folder, name, *words)])
    return folder


def as_family(folder: Path, name: str, **changes: object) -> None:
    """Replace the policy in FOLDER/model by a random model of a family, with the same tokens.

    Changes are of its config.json.
    """
    model, written = folder / "model", folder / name
    config = json.loads((model / "config.json").read_text())
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings")
    write_family(written, name, **{key: config[key] for key in kept}, **changes)
    for file in ("config.json", "model.safetensors"):
        (written / file).replace(model / file)


# Keys of the published config.json, which engines read and transformers does not write.
HUB: dict[object, dict[str, object]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}


def as_wrapped(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model that sees images, for that of its language model."""
    around = ("vision_config", "tie_word_embeddings")
    text = {key: value for key, value in settings.items() if key not in around}
    return {
        "model_type": settings["model_type"].removesuffix("_text"),
        "text_config": text,
        "image_token_id": IMAGE_TOKEN,
        **{key: settings[key] for key in around},
    }


def main(folder: Path, name: str, *changes: str) -> None:
    """Write a model; every tensor is random, so that mix-ups show."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    changed = dict(one.split("=", 1) for one in changes)
    settings = {**SHAPE, **MODELS[name], **{k: json.loads(v) for k, v in changed.items()}}
    if "vision_config" in settings:
        config, kind = AutoConfig.for_model(**as_wrapped(settings)), AutoModelForImageTextToText
    else:
        config, kind = AutoConfig.for_model(**settings), AutoModelForCausalLM
    generator = torch.Generator().manual_seed(7)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or "inv_freq" in key:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if key.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")) or (
                "layernorm" in key
            ):
                tensor.add_(0.2 * noise)  # noise around 1, or around 0 if the norm adds 1
            elif key.endswith("gate.weight"):
                tensor.copy_(noise)  # so that experts are far from equal
            else:
                tensor.copy_(0.2 * noise)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | HUB.get(settings["model_type"], {})))
    (folder / "tokenizer.json").write_text("{}")
    if "vision_config" in settings:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
