"""Gymnasium's environments that are played in text.

    [environment]
    function = "slipstream.generators.environments.adapters.gymnasium:Game"
    options.id = "FrozenLake-v1"
    options.observe = "render"
    options.actions = ["left", "down", "right", "up"]

Observations are text, numbers, or tuples and dictionaries of these, or what ``render`` writes in
the mode "ansi"; actions are text, or a choice (``Discrete``). Arrays and pictures are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from slipstream.generators.environments.adapters.opening import episode_seed, opening
from slipstream.generators.environments.sdk import Environment, Messages, Prompt, Reply, Step
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.source_files import module_named
from slipstream.wire.messages.trajectory import Json

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise ConfigError(
        f"gymnasium cannot be imported ({error}): pip install 'slipstream[env-gymnasium]'"
    ) from error

_RESET_OPTIONS = "reset_options"  # key of a prompt's extra_info
_COLORED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_LONGEST_SHOWN = 200


class Game(Environment):
    """One episode of a Gymnasium environment."""

    def __init__(
        self,
        *,
        id: str = "",
        make: str = "",
        kwargs: Mapping[str, Json] | None = None,
        observe: Literal["observation", "render"] = "observation",
        actions: Sequence[str] = (),
        action_pattern: str = "",
        unreadable_reward: float = 0.0,
    ) -> None:
        """Make it.

        Args:
            id: Argument of ``gymnasium.make``, such as Blackjack-v1 or my_module:Game-v0.
            make: Alternative to ``id``, MODULE:NAME or FILE.py:NAME of a class or function that
                returns an environment.
            kwargs: Keyword arguments of either.
            observe: Text for the policy: the observation, or what the environment renders.
            actions: Names of the choices, in order; without names choices are numbers.
            action_pattern: Regular expression; its last match in a reply, or the first group of
                that, is the action. Without it the whole reply is.
            unreadable_reward: Reward of a reply without an action; the policy is asked again.
        """
        self._observe, self._pattern = observe, re.compile(action_pattern, re.DOTALL)
        self._actions = tuple(actions)
        self._unreadable_reward = unreadable_reward
        self._num_unreadable = 0
        self._env = made(id, make, {**(kwargs or {})}, observe)

    @classmethod
    @override
    def prepare(cls, **options: Any) -> None:
        """Make an environment, and check that it can be played in text."""
        game = cls(**options)
        try:
            check_spaces(game._env, game._observe, game._actions)
        finally:
            game._env.close()

    @override
    async def reset(self, prompt: Prompt) -> Messages:
        """Begin the episode that the prompt's seed names."""
        named = prompt.extra_info.get(_RESET_OPTIONS)
        options = dict(named) if isinstance(named, Mapping) else None
        observation, _ = self._env.reset(seed=episode_seed(prompt), options=options)
        return opening(prompt, self._said(observation))

    @override
    async def step(self, reply: Reply) -> Step:
        """Carry out the action in a reply."""
        text = chosen_text(self._pattern, reply.text)
        try:
            action = action_of(self._env.action_space, text, self._actions)
        except ValueError as error:
            self._num_unreadable += 1
            parts = {"unreadable": float(self._num_unreadable)}
            return Step(messages=str(error), reward=self._unreadable_reward, parts=parts)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        return Step(
            messages=() if done else self._said(observation),
            reward=float(reward),
            done=done,
            parts={"unreadable": float(self._num_unreadable)},
        )

    @override
    async def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _said(self, observation: object) -> str:
        if self._observe == "render":
            return without_colors(text_of(self._env.render(), "what render returns"))
        return text_of(observation, "the observation")


def made(name: str, make: str, kwargs: dict[str, Json], observe: str) -> "gymnasium.Env[Any, Any]":
    """Make an environment.

    Raises:
        ValueError: no environment is named, or it does not take these arguments.
        TypeError: the result is no environment.
    """
    if bool(name) == bool(make):
        raise ValueError(f"expected one of id and make, got id = {name!r} and make = {make!r}")
    if observe not in ("observation", "render"):
        raise ValueError(f"observe: expected observation or render, got {observe!r}")
    if observe == "render":
        kwargs = {"render_mode": "ansi", **kwargs}
    if name:
        environment: Any = gymnasium.make(name, **kwargs)
    else:
        where, _, attribute = make.rpartition(":")
        environment = getattr(module_named(where), attribute)(**kwargs)
    if not isinstance(environment, gymnasium.Env):
        kind = type(environment).__name__
        raise TypeError(f"{make or name} made {kind}, expected gymnasium.Env")
    return environment


def check_spaces(env: "gymnasium.Env[Any, Any]", observe: str, actions: Sequence[str]) -> None:
    """Check that an environment can be played in text.

    Raises:
        ValueError: its observations are not text, or names do not fit its actions.
        TypeError: its actions are not text.
    """
    if observe == "observation":
        if (space := unspoken(env.observation_space)) is not None:
            raise ValueError(
                f"observations hold {space}, which is no text: wrap it in a "
                "gymnasium.ObservationWrapper that returns text (option make), or set "
                'observe = "render" if it renders in the mode "ansi"'
            )
    elif env.render_mode != "ansi":
        raise ValueError(
            f'observe = "render" needs the render mode "ansi", it has {env.render_mode!r}'
        )
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        if actions and len(actions) != space.n:
            raise ValueError(f"actions: expected {space.n} names, got {len(actions)}")
    elif not isinstance(space, spaces.Text):
        raise TypeError(f"actions are {space}: expected Text or Discrete")
    elif actions:
        raise ValueError("actions: its actions are text, which has no names")


def unspoken(space: "spaces.Space[Any] | None") -> "spaces.Space[Any] | None":
    """Return a part of a space that text cannot express; None if text expresses all of it."""
    if isinstance(space, spaces.Dict):
        inner = map(unspoken, space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        inner = map(unspoken, space.spaces)
    elif isinstance(space, spaces.Text | spaces.Discrete) or space is None:
        return None
    else:
        return space
    return next((part for part in inner if part is not None), None)


def chosen_text(pattern: "re.Pattern[str]", reply: str) -> str:
    """Return the action in a reply: the whole reply without a pattern; "" if nothing matches."""
    if not pattern.pattern:
        return reply.strip()
    matches = list(pattern.finditer(reply))
    if not matches:
        return ""
    return str(matches[-1].group(1 if pattern.groups else 0) or "").strip()


def action_of(space: "spaces.Space[Any]", text: str, names: Sequence[str]) -> str | int:
    """Return the action that a text means.

    Raises:
        ValueError: the text is no action; the message is for the policy.
    """
    if isinstance(space, spaces.Text):
        if not text or not space.contains(text):
            raise ValueError(
                f"That is no action: expected {space.min_length} to {space.max_length} characters "
                f"of {''.join(sorted(space.character_set))!r}."
            )
        return text
    if not isinstance(space, spaces.Discrete):
        raise TypeError(f"actions are {space}: expected Text or Discrete")
    first, number = int(space.start), int(space.n)
    if names:
        for index, name in enumerate(names):
            if text.casefold() == name.casefold():
                return first + index
        raise ValueError(f"That is no action: expected one of {', '.join(names)}.")
    if re.fullmatch(r"-?\d{1,18}", text) and space.contains(int(text)):
        return int(text)
    raise ValueError(f"That is no action: expected a number from {first} to {first + number - 1}.")


def text_of(value: object, what: str) -> str:
    """Return an observation as text: itself, a number, or JSON of these.

    Raises:
        TypeError: the observation is, or holds, a value without a text.
    """
    plain = _plain(value, what)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any, what: str) -> Json:  # noqa: ANN401
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{what}, key {key!r}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, what) for inner in value]
    shape = getattr(value, "shape", None)
    if shape == ():  # a number of numpy's
        return _plain(value.item(), what)
    kind = type(value).__name__
    if shape is not None:
        kind = f"{kind} of shape {tuple(shape)} and type {getattr(value, 'dtype', 'unknown')}"
    raise TypeError(f"{what} is {kind}, expected text"[:_LONGEST_SHOWN])


def without_colors(text: str) -> str:
    """Return a terminal's text without escape codes; colored text is in brackets."""
    return _ESCAPE.sub("", _COLORED.sub(r"[\1]", text)).strip("\n")
