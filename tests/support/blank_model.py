"""A small Llama without weights."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

_SPECIALS = ("<pad>", "<bos>", "<eos>")
_CHARACTERS = "0123456789+-*=<> "


def write_blank_model(
    folder: Path, *, hidden: int = 128, layers: int = 4, vocab_size: int | None = None
) -> None:
    """Write the configuration and tokenizer of a small Llama without weights.

    A ``vocab_size`` above the tokenizer's pads the vocabulary with tokens that mean nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*_SPECIALS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size or len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **tokens},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
