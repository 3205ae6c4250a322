"""A tiny Llama that says what a test writes down, for what a real engine makes of replies."""

import json
import string
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.blank_model import write_blank_model

_SPECIALS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<tool>", "<system>")
_TEMPLATE = """\
{%- if tools %}<system>{{ tools | tojson }}<eos>{% endif %}
{%- for message in messages %}
{{- '<' + message.role + '>' }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
_HEAD = 32  # dimensions of an attention head
_SURE = 30.0  # logit of the token that follows


def write_scripted_policy(
    folder: Path, replies: Sequence[Sequence[str]], *, special: Collection[str] = ()
) -> None:
    """Write a Llama of one layer without attention: each token says which one follows.

    Args:
        folder: to write into.
        replies: each as its tokens, which are in no other reply. One of them follows each
            ``<assistant>``, all with the same probability.
        special: which tokens are special ones.
    """
    tokens = [token for reply in replies for token in reply]
    write_blank_model(folder, hidden=_HEAD, layers=1)
    known = [*_SPECIALS, *string.printable]
    tokenizer = Tokenizer(
        models.WordLevel({one: i for i, one in enumerate(known)}, unk_token="<pad>")  # noqa: S106
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.add_tokens(
        [AddedToken(one, normalized=False, special=one in special) for one in tokens]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    size = tokenizer.get_vocab_size()
    assert size == len(known) + len(tokens), "a token is in two replies"
    hidden = -(-size // _HEAD) * _HEAD  # a dimension for each token
    changed = {
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_attention_heads": hidden // _HEAD,
        "num_key_value_heads": hidden // _HEAD,
        "head_dim": _HEAD,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16_384,
    }
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(size, hidden)
    end, begin = (tokenizer.token_to_id(one) for one in ("<eos>", "<assistant>"))
    for reply in replies:
        ids = [begin, *map(tokenizer.token_to_id, reply), end]
        head[ids[1:], ids[:-1]] = _SURE / hidden**0.5  # a normed one-hot is as long as its root
    layer = "model.layers.0."
    shapes = {
        "model.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"},
        **{f"{layer}mlp.{one}_proj.weight": (64, hidden) for one in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (hidden, 64),
    }
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in shapes.items()
    }
    tensors |= {"model.embed_tokens.weight": torch.eye(size, hidden), "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
