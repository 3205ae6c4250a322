"""Tiny random models in Hugging Face's format, written without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 131,  # odd, so that tensor parallelism pads it
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 128,
        "tie_word_embeddings": False,
        "head_dim": 32,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 131,
        "tie_word_embeddings": False,
        "rope_theta": 100000.0,
    },
}
MIXTURES: dict[str, dict[str, object]] = {  # of experts
    "qwen3_moe": {
        **FAMILIES["qwen3"],
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
    }
}
# Rotary embeddings that are scaled so early that sequences of 22 tokens show it.
SCALED: dict[str, dict[str, object]] = {
    "llama3": {
        **FAMILIES["llama"],
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn": {
        **FAMILIES["qwen3"],
        "model_type": "qwen3",
        "rope_parameters": {
            "rope_theta": 1000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def write_tiny_model(folder: Path, family: str, **changed: object) -> Path:
    """Write a random float32 model; norms and biases are random too, so that mix-ups show."""
    families = FAMILIES | SCALED | MIXTURES
    config = {"model_type": family, "dtype": "float32", **SHAPE, **families[family], **changed}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(config: dict[str, object]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    def vector(size: int, mean: float) -> Tensor:
        return mean + 0.2 * torch.randn(size, generator=generator)

    family, hidden, inner = config["model_type"], 64, 176
    normed = family in {"qwen3", "qwen3_moe"}
    head = 32 if normed else 16
    queries, groups = (
        int(str(config[name])) for name in ("num_attention_heads", "num_key_value_heads")
    )
    rows = {"q": queries * head, "k": groups * head, "v": groups * head}
    vocab = int(str(config["vocab_size"]))
    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": vector(hidden, 1.0),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = vector(hidden, 1.0)
        for part, size in rows.items():
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = matrix(size, hidden)
            if family == "qwen2":
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = vector(size, 0.0)
        if normed:
            for part in "qk":
                tensors[f"{prefix}self_attn.{part}_norm.weight"] = vector(head, 1.0)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, queries * head)
        mlps = {f"{prefix}mlp.": inner}
        if "num_experts" in config:
            experts = range(int(str(config["num_experts"])))
            mlps = {f"{prefix}mlp.experts.{expert}.": 48 for expert in experts}
            tensors[f"{prefix}mlp.gate.weight"] = 5 * matrix(len(mlps), hidden)
        for mlp, width in mlps.items():
            tensors[f"{mlp}gate_proj.weight"] = matrix(width, hidden)
            tensors[f"{mlp}up_proj.weight"] = matrix(width, hidden)
            tensors[f"{mlp}down_proj.weight"] = matrix(hidden, width)
    return tensors


def sequences() -> list[list[int]]:
    """Return token sequences of different lengths, some of them equally long."""
    generator = torch.Generator().manual_seed(5)
    lengths = [7, 13, 5, 22, 7, 16, 3, 13]
    return [torch.randint(0, 128, (n,), generator=generator).tolist() for n in lengths]
