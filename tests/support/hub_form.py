"""Tiny models in the form in which they are published on the hub."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.wire.models.model_files import WEIGHTS
from tests.support.families import as_family

_PARTS = ("gate", "up", "down")
_WITHIN = "model.language_model."
_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "temporal_patch_size": 2,
}


def as_published(plain: Path, folder: Path) -> dict[str, Tensor]:
    """Write a Qwen3.5 of the language model in another folder; return its tensors.

    It is a language model within another that sees, with layers that predict further tokens, and
    the experts of a mixture's layer are in one tensor.
    """
    stored = load_file(plain / WEIGHTS)
    text = json.loads((plain / "config.json").read_text())
    experts = text.get("num_experts", 0)
    for layer in range(text["num_hidden_layers"] if experts else 0):
        prefix = f"model.layers.{layer}.mlp.experts"
        of_each = [
            {part: stored.pop(f"{prefix}.{number}.{part}_proj.weight") for part in _PARTS}
            for number in range(experts)
        ]
        both = [torch.cat([expert["gate"], expert["up"]]) for expert in of_each]
        stored[f"{prefix}.gate_up_proj"] = torch.stack(both)
        stored[f"{prefix}.down_proj"] = torch.stack([expert["down"] for expert in of_each])
    stored = {
        name.replace("model.", _WITHIN, 1) if name.startswith("model.") else name: tensor
        for name, tensor in stored.items()
    }
    stored["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(6, 2).bfloat16()
    stored["mtp.fc.weight"] = torch.randn(4, 8)
    shutil.copytree(plain, folder)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    around = text["model_type"].removesuffix("_text")
    text["mtp_num_hidden_layers"] = 1
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = {
        "architectures": [f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration"],
        "image_token_id": 120,
        "model_type": around,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"model_type": around},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PICTURES))
    return stored


def as_family_of_the_hub(folder: Path, name: str) -> None:
    """Replace the policy in FOLDER/model by a random model of a family, as the hub has it."""
    as_family(folder, name)
    model = folder / "model"
    if name.startswith("qwen3_5"):
        as_published(model.rename(folder / "plain"), model)
    elif name == "gpt_oss":
        in_mxfp4(model)


def policy_alone(stored: Mapping[str, Tensor], *, has_tower: bool = False) -> dict[str, Tensor]:
    """Return a policy's tensors under the names that it would have without a model around it.

    With ``has_tower`` its vision tower is trained, too.
    """
    alone: dict[str, Tensor] = {}
    for full, tensor in stored.items():
        name = full.replace(_WITHIN, "model.", 1)
        prefix, _, last = name.rpartition(".")
        if "visual." in name or name.startswith("mtp."):
            if has_tower:
                alone[name.removeprefix("model.")] = tensor
            continue
        if name == full or not prefix.endswith(".experts"):
            alone[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                alone[f"{prefix}.{number}.{part}.weight"] = rows
    return alone


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Give a gpt-oss in a folder random experts of 4 bits; return what its tensors are worth."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(folder / WEIGHTS)
    numbers, values = torch.Generator().manual_seed(5), dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), generator=numbers, dtype=torch.uint8
        )
        scales = torch.randint(
            115, 126, (experts, rows, columns // 32), generator=numbers, dtype=torch.uint8
        )
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    named = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": named}))
    return values
