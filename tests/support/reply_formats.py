"""Calls and thoughts of each format that SGLang's parsers read, as its models write them."""

# ruff: noqa: RUF001 marks of formats

_XML = "<tool_call>{name}\n<arg_key>at</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
_JSON = '{{"name": "{name}", "arguments": {{"at": "{value}"}}}}'
_CODER = (
    "<tool_call>\n<function={name}>\n<parameter=at>\n{value}\n</parameter>\n</function>\n"
    "</tool_call>"
)
_DSML = (
    '<｜DSML｜{calls}>\n<｜DSML｜{s}invoke name="{{name}}">\n<｜DSML｜{s}parameter name="at" '
    'string="true">{{value}}</｜DSML｜{s}parameter>\n</｜DSML｜{s}invoke>\n</｜DSML｜{calls}>'
)
_INVOKE = (
    '<{tag}>\n<{ns}invoke name="{{name}}">\n<{ns}parameter name="at">{{value}}</{ns}parameter>\n'
    "</{ns}invoke>\n</{tag}>"
)
_M3 = "]<]minimax[>["
FORMATS = {
    "apertus2509": '<|tools_prefix|>[{{"{name}": {{"at": "{value}"}}}}]<|tools_suffix|>',
    "beam": (
        " to={name}<|channel|>analysis <|constrain|>xml<|message|>"
        '<rfl:parameter name="at">\n{value}\n</rfl:parameter><|call|>'
    ),
    "cohere_command4": (
        '<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{name}", "parameters": '
        '{{"at": "{value}"}}}}]<|END_ACTION|>'
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        '{{"at": "{value}"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
        '{{"at": "{value}"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv32": _DSML.format(calls="function_calls", s=""),
    "deepseekv4": _DSML.format(calls="tool_calls", s=""),
    "deepseekv41": _DSML.format(calls=" calls", s=" "),
    "dots": _INVOKE.format(tag="dots_function_call", ns=""),
    "glm": _XML,
    "glm45": _XML,
    "glm47": _XML.replace("\n", ""),
    "gpt-oss": (
        "<|start|>assistant<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>"
        '{{"at": "{value}"}}<|call|>'
    ),
    "k2_horizon": (
        "<ifm|tool_calls>\n<ifm|tool_call>{name}\n<ifm|arg_key>at</ifm|arg_key>\n"
        "<ifm|arg_value>{value}</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        '<|tool_call_argument_begin|>{{"at": "{value}"}}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>'
        '<|open|>argument key="at" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": '<|tool_call_start|>[{name}(at="{value}")]<|tool_call_end|>',
    "ling3": _XML,
    "llama3": '<|python_tag|>{{"name": "{name}", "parameters": {{"at": "{value}"}}}}',
    "mimo": (
        "<tool_call>\n<function={name}>\n<parameter=at>{value}</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "minicpm5": '<function name="{name}"><param name="at">{value}</param></function>',
    "mistral": '[TOOL_CALLS] [{{"name": "{name}", "arguments": {{"at": "{value}"}}}}]',
    "muse": (
        "<|start|>assistant to=tools<|message|>"
        + _INVOKE.format(tag="atem:function_calls", ns="atem:")
        + "<|eom|>"
    ),
    "poolside_v1": _XML,
    "pythonic": '[{name}(at="{value}")]',
    "qwen": f"<tool_call>\n{_JSON}\n</tool_call>",
    "qwen25": f"<tool_call>\n{_JSON}\n</tool_call>",
    "qwen3_coder": _CODER,
    "spark25": _XML.replace("</arg_key>\n", "</arg_key>"),
    "step3": (
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="{name}">\n<steptml:parameter name="at">{value}'
        "</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
    ),
    "step3p5": _CODER,
    "minimax-m2": _INVOKE.format(tag="minimax:tool_call", ns=""),
    "minimax-m3": (
        f'{_M3}<tool_call>{_M3}<invoke name="{{name}}">{_M3}<at>{{value}}{_M3}</at>'
        f"{_M3}</invoke>{_M3}</tool_call>"
    ),
    "nanbeige": _CODER,
    "trinity": f"<tool_call>\n{_JSON}\n</tool_call>",
    "interns1": (
        '<|action_start|> <|plugin|>\n{{"name": "{name}", "parameters": {{"at": "{value}"}}}}'
        "<|action_end|>"
    ),
    "hermes": f"<tool_call>{_JSON}</tool_call>",
    "hunyuan": (
        "<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>at</arg_key>\n"
        "<arg_value>{value}</arg_value>\n</tool_call>\n</tool_calls>"
    ),
    "gigachat3": f"<|function_call|>{_JSON}",
    "gigachat35": (
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="{name}">\n<｜GCML｜parameter name="at" '
        'string="true">{value}</｜GCML｜parameter>\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>'
    ),
    "gemma4": '<|tool_call>call:{name}{{at:<|"|>{value}<|"|>}}<tool_call|>',
    "inkling": (
        '<|message_model|>{name}<|content_invoke_tool_json|>{{"name": "{name}", "args": '
        '{{"at": "{value}"}}}}<|end_message|>'
    ),
    "iquest_q1": _XML.replace("tool_call", "iquest_tool_call"),
}
"""By name of the parser: ``name`` of the tool, and ``value`` of its one argument ``at``, a text."""
PROSE = {"muse": "<|start|>assistant to=user<|message|>{}<|eom|>"}
"""How text is written beside calls, by name of the parser; where it is not named, as it is."""
THOUGHTS = {
    **dict.fromkeys(
        (
            *("deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "gigachat35"),
            *("glm45", "granite_thinking_parser", "hunyuan", "interns1", "iquest_q1", "kimi_k2"),
            *("ling3", "mimo", "minimax", "minimax-append-think", "nanbeige", "nemotron_3"),
            *("poolside_v1", "qwen3", "qwen3-thinking", "step3", "step3p5"),
        ),
        ("<think>", "</think>"),
    ),
    "apertus2509": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "beam": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "inkling": ("<|content_thinking|>", "<|end_message|>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse": (" to=self<|message|>", "<|eom|>"),
}
"""Marks of a thought, by name of the parser."""
CHANNELS = {"beam", "gpt-oss", "inkling", "muse"}
"""Of those, where the mark that ends a thought ends other parts too."""
FORCED = {
    *("cohere_command4", "deepseek-r1", "gigachat35", "iquest_q1", "k2_horizon", "kimi_k3"),
    *("minimax", "qwen3-thinking", "step3", "step3p5"),
}
"""Of those, where a reply begins in a thought, whether its mark is there or not."""
