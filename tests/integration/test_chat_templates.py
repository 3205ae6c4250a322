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
INSTRUCTIONS_IN_BRACKETS = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}
    {%- set system = false %}{% set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must take turns: user, assistant, ...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}{% set content = message['content'] %}{% endif %}
    {%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}
"""  # shaped like Llama 2's and Mixtral's
NAMESPACES_AND_FULL_WIDTH = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=true, system_prompt='', is_tool=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first %}{% set ns.system_prompt = message['content'] %}{% set ns.is_first = false %}
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{% endif %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.is_tool = false %}
{{- '<\uff5cUser\uff5c>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<\uff5cAssistant\uff5c>' + content + eos_token }}{%- endif %}
{%- endfor %}{% if add_generation_prompt and not ns.is_tool %}
{{- '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}
"""  # shaped like DeepSeek-R1's
MIDDLES = (  # shaped like Moonlight's
    "{%- for message in messages -%}"
    "{%- if loop.first and messages[0]['role'] != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant provided by M.<|im_end|>"
    "{%- endif -%}"
    "{%- if message['role'] == 'system' -%}<|im_system|>{%- endif -%}"
    "{%- if message['role'] == 'user' -%}<|im_user|>{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}<|im_assistant|>{%- endif -%}"
    "{{ message['role'] }}<|im_middle|>{{message['content']}}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
ROLES_ON_LINES = """\
[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{{- item.text if item.type == 'text' else '' }}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 %}
{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- if loop.index0 > ns.last_user_index %}{{ '\\n<think></think>' }}{% endif %}
{{ '\\n' + visible_text(m.content).strip() }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""  # shaped like GLM-4.5's  # noqa: E501
BACKWARDS = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # shaped like Qwen3's  # noqa: E501
LINES = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""  # shaped like TinyLlama's
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
    [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nfour\n</think>\n\nIt is 4."},
        {"role": "user", "content": "<tool_response>\n5\n</tool_response>"},
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
    "llama2": (INSTRUCTIONS_IN_BRACKETS, {}, "tokenizer_config.json"),
    "deepseek-r1": (NAMESPACES_AND_FULL_WIDTH, {}, "tokenizer_config.json"),
    "moonlight": (MIDDLES, {}, "tokenizer_config.json"),
    "glm4-moe": (ROLES_ON_LINES, {}, "chat_template.jinja"),
    "glm4-moe-without-thinking": (
        ROLES_ON_LINES,
        {"enable_thinking": False},
        "chat_template.jinja",
    ),
    "qwen3": (BACKWARDS, {}, "chat_template.jinja"),
    "tinyllama": (LINES, {}, "tokenizer_config.json"),
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
        codec.tokens(Prompt(prompt=tuple(ChatMessage(**turn) for turn in turns)))
        for turns in CONVERSATIONS
    ]
    assert ours == of_transformers[name]
