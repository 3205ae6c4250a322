"""Conversations become the token ids that transformers makes of them."""

import json
from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from slipstream.generators.text.codec import TextCodec
from slipstream.wire.messages.trajectory import ChatMessage, Prompt
from slipstream.wire.settings.sections import SamplingSection
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration

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


def write_model(
    folder: Path, template: str, where: Literal["tokenizer_config.json", "chat_template.jinja"]
) -> None:
    folder.mkdir()
    write_tokenizer(folder)
    if where == "chat_template.jinja":
        (folder / where).write_text(template)
    else:
        config = json.loads((folder / where).read_text())
        (folder / where).write_text(json.dumps(config | {"chat_template": template}))


CASES: dict[
    str, tuple[str, dict[str, object], Literal["tokenizer_config.json", "chat_template.jinja"]]
] = {
    "smollm2": (CHATML_WITH_DEFAULT_SYSTEM, {}, "tokenizer_config.json"),
    "qwen": (TOOLS_AND_WHITE_SPACE, {}, "chat_template.jinja"),
    "qwen-without-thinking": (
        TOOLS_AND_WHITE_SPACE,
        {"enable_thinking": False},
        "tokenizer_config.json",
    ),
    "llama3": (HEADERS_AND_BOS, {"date": "26 Jul"}, "chat_template.jinja"),
    "llama3-today": (HEADERS_AND_BOS, {}, "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each case."""
    root = tmp_path_factory.mktemp("models")
    for name, (template, _, where) in CASES.items():
        write_model(root / name, template, where)
    return root


@pytest.fixture(scope="module")
def of_transformers(cases: Path) -> dict[str, list[list[int]]]:
    """Return the token ids of each case."""
    kwargs = {str(cases / name): given for name, (_, given, _) in CASES.items()}
    file = cases / "order.json"
    file.write_text(json.dumps({"conversations": CONVERSATIONS, "kwargs": kwargs}))
    (printed,) = outputs([start(cases, "integration.transformers_chats", file)])
    return {Path(folder).name: ids for folder, ids in json.loads(printed).items()}


@pytest.mark.parametrize("name", CASES)
def test_token_ids_are_those_of_transformers(
    cases: Path, of_transformers: dict[str, list[list[int]]], name: str
):
    _, kwargs, _ = CASES[name]
    codec = TextCodec(cases / name, SamplingSection(chat_template_kwargs=kwargs))
    ours = [
        codec.encode(Prompt(prompt=tuple(ChatMessage(**turn) for turn in turns)))
        for turns in CONVERSATIONS
    ]
    assert ours == of_transformers[name]
