"""Random weights for the small Llama that blank_model describes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make_qwen3(folder: Path) -> None:
    """Turn a small Llama into a Qwen3 of the same sizes, whose queries and keys are normalized."""
    config = json.loads((folder / "config.json").read_text())
    del config["mlp_bias"]
    changed = {**config, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(changed))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            ones = torch.ones(config["head_dim"])
            tensors[f"model.layers.{layer}.self_attn.{norm}.weight"] = ones
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_qwen3_moe(folder: Path, *, experts: int = 4) -> None:
    """Turn a small Llama into a Qwen3 whose MLPs are experts, of which each token has two."""
    make_qwen3(folder)
    config = json.loads((folder / "config.json").read_text())
    width = config["intermediate_size"] // 2
    changed = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,  # SGLang ties them in no model of the family
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config | changed))
    dense = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in dense.items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(5)
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = 0.15 * torch.randn(table.shape, generator=generator)
    for layer in range(config["num_hidden_layers"]):
        prefix, hidden = f"model.layers.{layer}.mlp.", config["hidden_size"]
        tensors[f"{prefix}gate.weight"] = torch.randn(experts, hidden, generator=generator)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, width) if name == "down_proj" else (width, hidden)
                matrix = 0.15 * torch.randn(shape, generator=generator)
                tensors[f"{prefix}experts.{expert}.{name}.weight"] = matrix
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_whole_blocks(folder: Path, *, experts: bool) -> None:
    """Turn a small Llama into a Qwen3 whose matrices have whole blocks of fp8, on two ranks too."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    write_random_weights(folder, scale=0.05, seed=3)
    make = make_qwen3_moe if experts else make_qwen3
    make(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:  # a token that gets another one still gets nearly the same
            tensor *= 0.2
        if "_proj" in name:  # a block that gets another one's scale shows
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            tensor *= 2.0 ** ((3 * rows[:, None] + columns) % 4 - 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_random_weights(folder: Path, *, scale: float, seed: int) -> None:
    """Fill a folder that holds config.json: matrices normal with deviation ``scale``, norms 1."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (groups * head, hidden),
        "self_attn.v_proj": (groups * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
