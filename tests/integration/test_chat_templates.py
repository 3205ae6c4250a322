"""Conversations become the token ids that transformers makes of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.trajectory import ChatMessage, Prompt
from slipstream.wire.settings.sections import SamplingSection

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]

CHATML_WITH_DEFAULT_SYSTEM = (  # shaped like SmolLM2's
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_AND_WHITE_SPACE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' + (tools | tojson) + '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are made of parts.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" and not message.tool_calls %}
        {%- if loop.last %}{%- break %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""  # shaped like Qwen2.5's, with Qwen3's switch
HEADERS_AND_BOS = """\
{% set loop_messages = messages %}
{% if date is not defined %}{% set date = strftime_now("%Y") %}{% endif %}
{{- bos_token }}{{- date }}
{% for message in loop_messages %}
  {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}
    {%- if message.role == "assistant" -%}{% generation %}{{ content }}{% endgeneration %}
    {%- else %}{{ content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""  # shaped like Llama 3's  # noqa: E501
SPECIALS = [
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "1 < 2 & 'ä' ->\n"}],
    [
        {"role": "user", "content": "What?\n\n"},
        {"role": "assistant", "content": "So <|im_end|>"},
        {"role": "user", "content": "{{ bos_token }}"},
    ],
]


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE whose post-processor would add a special token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["You are a helpful assistant", "What is it?"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": {"content": "<|begin_of_text|>", "__type": "AddedToken"},
                "eos_token": "<|im_end|>",
            }
        )
    )


def of_transformers(folder: Path, kwargs: dict[str, object]) -> list[list[int]]:
    order = json.dumps({"conversations": CONVERSATIONS, "kwargs": kwargs})
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.transformers_chats", str(folder)],
        cwd=ROOT,
        input=order,
        capture_output=True,
        text=True,
        check=True,
    )
    ids: list[list[int]] = json.loads(done.stdout)
    return ids


@pytest.mark.parametrize(
    ("template", "kwargs", "where"),
    [
        (CHATML_WITH_DEFAULT_SYSTEM, {}, "tokenizer_config.json"),
        (TOOLS_AND_WHITE_SPACE, {}, "chat_template.jinja"),
        (TOOLS_AND_WHITE_SPACE, {"enable_thinking": False}, "tokenizer_config.json"),
        (HEADERS_AND_BOS, {"date": "26 Jul"}, "chat_template.jinja"),
        (HEADERS_AND_BOS, {}, "tokenizer_config.json"),
    ],
    ids=["smollm2", "qwen", "qwen-without-thinking", "llama3", "llama3-today"],
)
def test_token_ids_are_those_of_transformers(
    tmp_path: Path, template: str, kwargs: dict[str, object], where: str
):
    write_tokenizer(tmp_path)
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(template)
    else:
        config = json.loads((tmp_path / where).read_text())
        (tmp_path / where).write_text(json.dumps(config | {"chat_template": template}))
    codec = TextCodec(tmp_path, SamplingSection(chat_template_kwargs=kwargs))
    ours = [
        codec.encode(Prompt(prompt=tuple(ChatMessage(**turn) for turn in turns)))
        for turns in CONVERSATIONS
    ]
    assert ours == of_transformers(tmp_path, kwargs)
