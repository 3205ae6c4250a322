"""A tiny policy that calls tools: some of its tokens are a whole call."""

import json
import string
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

_SPECIALS = ("<pad>", "<bos>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"at":  2}}\n</tool_call>',  # two spaces
)
_TEMPLATE = """\
{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
_LOUDER = 4.0  # rows of tokens that it is to say often


def write_tool_policy(folder: Path) -> None:
    """Write a random Llama of two layers whose replies call tools in every other reply."""
    write_blank_model(folder, hidden=64, layers=2)
    vocabulary = {token: i for i, token in enumerate([*_SPECIALS, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, calls = tokenizer.token_to_id("<|end|>"), [tokenizer.token_to_id(one) for one in CALLS]
    for name, changed in {
        "config.json": {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end},
        "generation_config.json": {"eos_token_id": end},
        "tokenizer_config.json": {"eos_token": "<|end|>"},
    }.items():
        content = json.loads((folder / name).read_text()) | changed
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    write_random_weights(folder, scale=0.15, seed=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][[end, *calls]] *= _LOUDER
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
