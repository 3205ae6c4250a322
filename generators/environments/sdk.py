"""Interface for custom environments.

    from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step

    class Guess(Environment):
        async def reset(self, prompt: Prompt) -> str:
            self._number = prompt.ground_truth
            return f"{prompt.text} Guess."

        async def step(self, reply: Reply) -> Step:
            if reply.text == self._number:
                return Step(done=True, reward=1.0)
            return Step(messages="No. Again.")

One object serves one trajectory, in a process of its own. ``environment.options`` are keyword
arguments of the class. Instead of a class it may be one function that drives any agent itself:

    async def rollout(client: openai.AsyncOpenAI, prompt: Prompt, **options) -> float: ...

All requests to the client are recorded, and its replies are trained with the returned reward. The
function may return a mapping instead: ``score`` is the reward, ``turn_rewards`` a list of rewards
for each reply in the order of time (without a score the reward is their sum), and other numbers are
metrics. A function ``prepare(**options)`` in the same module works as ``Environment.prepare``.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slipstream.wire.messages.trajectory import ChatMessage, Json, Prompt

__all__ = [
    "ChatMessage",
    "DescribedTool",
    "Environment",
    "Messages",
    "Prompt",
    "Reply",
    "Step",
    "ToolCall",
    "Unavailable",
    "schema_of",
]

Messages: TypeAlias = str | Mapping[str, Json] | Sequence[Mapping[str, Json] | ChatMessage]
"""Text of a user, one message of OpenAI's API, or several of either form."""
Tool: TypeAlias = Callable[..., Any]
_LONGEST_SHOWN = 200


class Unavailable(Exception):  # noqa: N818 it is a result, not a fault
    """Raised by an environment that cannot continue: the trajectory is tried elsewhere."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a reply makes."""

    name: str
    arguments: dict[str, Json]
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply in one turn."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"  # or length: it was cut off
    num_tokens: int = 0
    thought: str = ""  # not part of the text; set with environment.reasoning_parser
    num_unreadable: int = 0  # unreadable tool calls, which remain in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows a reply."""

    messages: Messages = ()
    reward: float | None = None  # reward of this turn; the learner gets each and their sum
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)  # named numbers, for metrics


class DescribedTool:
    """A tool whose arguments are described by a JSON schema instead of a function's types."""

    def __init__(
        self, name: str, description: str, parameters: Mapping[str, Json], run: Tool
    ) -> None:
        """Take a function with keyword arguments, which may be async."""
        self.__name__ = name
        self.description = description
        self.parameters = parameters
        self._run = run

    def __call__(self, /, **arguments: Any) -> Any:  # noqa: ANN401 as the tool has them
        """Run it."""
        return self._run(**arguments)


class Environment:
    """Base of environments: override ``step``, and other methods as needed."""

    tools: Sequence[Tool] = ()
    """Functions that the policy may call; their JSON schemas are made from their types."""

    @classmethod
    def prepare(cls, **options: Any) -> None:  # noqa: ANN401 as the class takes them
        """Check the options, once and before any trajectory; do slow imports.

        All that it starts must have ended when it returns, because processes are forked after it.

        Raises:
            ValueError: an option is wrong, or something is missing; the run does not start.
        """

    async def reset(self, prompt: Prompt) -> Messages:
        """Begin, and return the first messages: by default those of the prompt."""
        return prompt.prompt

    async def step(self, reply: Reply) -> Step | Messages:
        """Answer a reply; messages alone are a step without reward.

        By default tool calls are carried out, and a reply without any ends the trajectory.
        """
        if not reply.tool_calls:
            return Step(done=True)
        return Step(messages=[await self.call(call) for call in reply.tool_calls])

    async def call(self, call: ToolCall) -> dict[str, Json]:
        """Carry out a tool call; return its result as a message.

        An error of the tool is the result, which the policy reads; ``Unavailable`` is raised.
        """
        tools = {tool.__name__: tool for tool in self.tools}
        result: object = f"error: there is no tool {call.name}, only {', '.join(tools) or 'none'}"
        try:
            if call.name in tools:
                result = tools[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = await result
            result = str(result)
        except Unavailable:
            raise
        except Exception as error:  # noqa: BLE001 foreign code may raise anything
            result = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call.call_id, "content": result}

    async def close(self) -> None:
        """Release what was opened; also called when a trajectory is given up."""


_TYPES: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema_of(tool: Tool) -> dict[str, Json]:
    """Return a tool as OpenAI's API describes it: name, first line of its docstring, arguments.

    Raises:
        ValueError: an argument has no type, or a type that JSON does not have, or the schema is
            malformed.
    """
    if isinstance(tool, DescribedTool):
        return _described(tool)
    hints = typing.get_type_hints(tool)
    properties: dict[str, Json] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise ValueError(f"tool {tool.__name__} takes any arguments (*{name}): name them")
        if name not in hints:
            raise ValueError(f"tool {tool.__name__}: argument {name} has no type")
        properties[name] = _schema(hints[name], f"tool {tool.__name__}: argument {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    described = (inspect.getdoc(tool) or "").partition("\n")[0]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def _described(tool: DescribedTool) -> dict[str, Json]:
    parameters = tool.parameters
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        shown = repr(parameters)[:_LONGEST_SHOWN]
        raise ValueError(f"tool {tool.__name__}: expected a JSON schema of an object, got {shown}")
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping) or not all(
        isinstance(schema, Mapping | bool) for schema in properties.values()
    ):
        raise ValueError(f"tool {tool.__name__}: properties of its schema hold no schemas")
    function = {
        "name": tool.__name__,
        "description": tool.description,
        "parameters": {"properties": {}, **parameters},
    }
    return {"type": "function", "function": function}


def _schema(hint: object, where: str) -> dict[str, Json]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    if arguments and type(None) in arguments:
        return {"anyOf": [_schema(argument, where) for argument in arguments]}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    raise ValueError(f"{where} has a type that JSON does not have: {hint}")
