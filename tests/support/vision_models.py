"""Tiny random models that see images, as transformers makes and writes them.

Usage: vision_models FOLDER FAMILY SEED
"""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.ranks.run import outputs, start

MARKS = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCABULARY = {token: number for number, token in enumerate([*MARKS, *_CHARACTERS])}
IMAGE_TOKEN = VOCABULARY["<|image_pad|>"]
# The published template of Qwen2.5-VL, without its system prompt and videos.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY["<|im_end|>"],
}
_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VOCABULARY["<|video_pad|>"],
    "vision_start_token_id": VOCABULARY["<|vision_start|>"],
    "vision_end_token_id": VOCABULARY["<|vision_end|>"],
}
VISION_MODELS: dict[str, dict[str, object]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        **_IDS,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        **_IDS,
    },
}


def write_vision(folder: Path, name: str, seed: int = 7) -> Path:
    """Write a model, its tokenizer and its image processor, in a process of its own."""
    outputs([start(folder.parent, "support.vision_models", folder, name, seed)])
    write_tokens(folder, name)
    return folder


def write_tokens(folder: Path, name: str) -> None:
    """Write a tokenizer of characters, and the image processor of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    patch = VISION_MODELS[name]["vision_config"]["patch_size"]  # type: ignore[index]
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
            "bos_token": None,
        },
        "generation_config.json": {"eos_token_id": VOCABULARY["<|im_end|>"]},
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen2_5_VLProcessor"
            if name == "qwen2_5_vl"
            else "Qwen3VLProcessor",
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.4, 0.45],
            "image_std": [0.5, 0.25, 0.3],
            "size": {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2},
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main(folder: Path, name: str, seed: str = "7") -> None:
    """Write config and weights; every tensor is random, so that mix-ups show."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**VISION_MODELS[name])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(int(seed))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or "inv_freq" in key:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if key.endswith("weight") and ("norm" in key or "ln_q" in key):
                tensor.add_(0.2 * noise)
            else:
                tensor.copy_(0.2 * noise)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
