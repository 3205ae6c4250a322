"""Outputs of transformers for given tokens.

Usage: python -m slipstream.deploy.preflight.align.reference MODEL FOLDER TYPE
Reads FOLDER/tokens.json and writes FOLDER/transformers.npz; TYPE is that of the weights. Started by
`slipstream align`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slipstream.wire.models.alignment import LOGPROBS, TOKENS, point

_ARRAY = np.ndarray[Any, Any]


def main(model_folder: str, folder: Path, dtype: str) -> None:
    """Record a model's outputs."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    found: dict[str, list[_ARRAY]] = {}

    def recording(name: str, *, is_choice: bool) -> Callable[[object, object, Any], None]:
        def record(_module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401
            tensor = output[-1] if is_choice else output
            tensor = tensor[0] if isinstance(tensor, tuple) else tensor
            rows = tensor.float().reshape(-1, tensor.shape[-1]).numpy()
            found.setdefault(name, []).append(rows)

        return record

    writes = type(AutoConfig.from_pretrained(model_folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if writes else AutoModelForImageTextToText
    model = kind.from_pretrained(model_folder, dtype=getattr(torch, dtype))
    text = getattr(model.model, "language_model", model.model)
    for number, layer in enumerate(text.layers):
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn
        parts = [("attention", attention), ("mlp", mlp)]
        if isinstance(getattr(mlp, "experts", None), torch.nn.Module):
            parts.append(("experts", mlp.gate if hasattr(mlp, "gate") else mlp.router))
        for part, module in parts:
            hook = recording(point(number, part), is_choice=part == "experts")
            module.register_forward_hook(hook)
    sequences = msgspec.json.decode((folder / TOKENS).read_bytes(), type=list[list[int]])
    with torch.no_grad():
        for tokens in sequences:
            token_ids = torch.tensor([tokens])
            logprobs = model(token_ids).logits[0, :-1].float().log_softmax(-1)
            own = logprobs.gather(-1, token_ids[0, 1:, None]).numpy()
            found.setdefault(LOGPROBS, []).append(np.concatenate([np.zeros((1, 1)), own]))
    arrays: dict[str, Any] = {name: np.concatenate(rows) for name, rows in found.items()}
    np.savez(folder / "transformers.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
