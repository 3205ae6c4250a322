"""The vision quickstart's task and policy: the color of a shape in an image.

The policy of 0.7M parameters has random weights: what it knows in the end it learned from rewards.
"""

import base64
import io
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.deploy.examples.addition import locked, write_rows
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 190),
    "orange": (250, 140, 30),
    "brown": (120, 80, 40),
    "pink": (240, 130, 180),
}
HELD_OUT = 256
_PROBLEMS = 2304
_EDGE = 64  # pixels
_PAPER = (235, 235, 235)
_SHADE = 15  # difference of a channel from the color's own, either way
_MARKS = ("<pad>", "<bos>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_OTHERS = ("<|video_pad|>", "color")
_WORDS = (*_MARKS, *_OTHERS, *COLORS, *(f"word{number}" for number in range(16)))
_IDS = {word: number for number, word in enumerate(_WORDS)}
_DEVIATION = 0.02  # standard deviation of random weights
_CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": len(_WORDS),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "pad_token_id": _IDS["<pad>"],
        "bos_token_id": _IDS["<bos>"],
        "eos_token_id": _IDS["<eos>"],
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_FILES: dict[str, object] = {
    "config.json": _CONFIG,
    "generation_config.json": {"eos_token_id": _IDS["<eos>"]},
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [
            {
                "id": _IDS[mark],
                "content": mark,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for mark in (*_MARKS, _OTHERS[0])
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": _IDS, "unk_token": "<pad>"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    },
}
_TEMPLATE = (
    "<bos>{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def prepare(folder: Path) -> None:
    """Put the problems and a policy with random weights into ``folder``.

    Leaves ``train.jsonl``, ``held_out.jsonl`` and ``model/``. Each appears whole or not at all,
    and files that are there are left alone if they are right.
    """
    with locked(folder):
        write_problems(folder)
        write_policy(folder / "model")


def write_problems(folder: Path) -> None:
    """Split the problems into held-out ones and the others."""
    draw = random.Random(7)  # noqa: S311 not for secrets
    rows = [_row(draw) for _ in range(_PROBLEMS)]
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        write_rows(folder / f"{name}.jsonl", part)


def _row(draw: random.Random) -> dict[str, object]:
    name = draw.choice(list(COLORS))
    image = base64.b64encode(shape_of(COLORS[name], draw)).decode()
    return {
        "prompt": [{"role": "user", "content": "<image>color"}],
        "images": [f"data:image/png;base64,{image}"],
        "ground_truth": name,
        "data_source": "colors",
    }


def shape_of(color: tuple[int, int, int], draw: random.Random) -> bytes:
    """Return a PNG of a disc or a square of about this color, anywhere on gray paper."""
    from PIL import Image, ImageDraw

    radius = draw.randint(12, 26)
    x, y = (draw.randint(radius, _EDGE - 1 - radius) for _ in range(2))
    shade = [max(0, min(255, channel + draw.randint(-_SHADE, _SHADE))) for channel in color]
    image = Image.new("RGB", (_EDGE, _EDGE), _PAPER)
    pencil = ImageDraw.Draw(image)
    shape = pencil.ellipse if draw.random() < 0.5 else pencil.rectangle
    shape((x - radius, y - radius, x + radius, y + radius), fill=tuple(shade))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_policy(folder: Path, seed: int = 7) -> None:
    """Write a policy with random weights, unless its folder is there."""
    if folder.is_dir() and any(folder.iterdir()):
        return
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(seed)
    with replacing_folder(folder, durable=False) as unfinished:
        for name, content in _FILES.items():
            (unfinished / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        (unfinished / "chat_template.jinja").write_text(_TEMPLATE, "utf-8")
        weights: dict[str, NDArray[np.float32]] = {}
        for name, shape in _shapes(load_hf_config(unfinished)).items():
            if len(shape) > 1:
                weights[name] = draw.normal(0, _DEVIATION, shape).astype(np.float32)
            else:  # norms multiply by 1, and biases add 0
                weights[name] = np.full(shape, float(name.endswith("weight")), np.float32)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})


def _shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its published name."""
    language = {
        f"model.language_model.{name.removeprefix('model.')}": shape
        for name, shape in config.tensor_shapes.items()
    }
    return language | {f"model.{name}": shape for name, shape in config.tower_shapes.items()}
