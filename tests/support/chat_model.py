"""A small Llama that takes conversations: tokens are characters of ASCII and ChatML's marks."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

MARKS = ("<pad>", "<|im_start|>", "<|im_end|>")
_CHARACTERS = ["\n", *map(chr, range(32, 127))]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(folder: Path, template: str = CHATML) -> Path:
    """Write a folder with config and tokenizer, without weights."""
    vocabulary = {token: i for i, token in enumerate([*MARKS, *_CHARACTERS])}
    write_blank_model(folder, hidden=64, layers=2, vocab_size=len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    path = folder / "tokenizer_config.json"
    names = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    return folder


def write_chat_policy(folder: Path, template: str = CHATML) -> Path:
    """Write the same with random weights."""
    write_chat_model(folder, template)
    write_random_weights(folder, scale=0.15, seed=3)
    return folder
