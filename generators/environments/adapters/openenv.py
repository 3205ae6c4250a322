"""Environments that an OpenEnv server serves.

    [environment]
    function = "slipstream.generators.environments.adapters.openenv:Remote"
    options = { url = "http://127.0.0.1:8000", action = "message", observation = "echoed_message" }

A trajectory has a session of its own on the server, over a WebSocket.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from slipstream.generators.environments.adapters.opening import episode_seed, opening
from slipstream.generators.environments.sdk import (
    Environment,
    Messages,
    Prompt,
    Reply,
    Step,
    Unavailable,
)
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

try:
    from openenv.core.env_server.types import WSErrorCode
    from openenv.core.generic_client import GenericEnvClient
except ImportError as error:
    raise ConfigError(
        f"openenv cannot be imported ({error}): pip install 'slipstream[env-openenv]'"
    ) from error

_RESET_OPTIONS = "reset_options"  # key of a prompt's extra_info
_IGNORED = ("done", "reward", "metadata")  # keys that every observation has
_LONGEST_SHOWN = 200


class Remote(Environment):
    """One session of a server."""

    def __init__(
        self,
        *,
        url: str,
        action: str = "",
        constants: Mapping[str, Json] | None = None,
        observation: str = "",
        unreadable_reward: float = 0.0,
        connect_s: float = 30.0,
        answer_s: float = 120.0,
    ) -> None:
        """Prepare.

        Args:
            url: URL of the server.
            action: Key of an action for the text of a reply; without it a reply is the JSON of a
                whole action.
            constants: Further keys of every action.
            observation: Keys, joined by dots, of the text in an observation; without them the
                policy gets the whole observation as JSON.
            unreadable_reward: Reward of a reply without an action; the policy is asked again.
            connect_s: Limit for the connection.
            answer_s: Limit for one answer of the server.

        Raises:
            ValueError: the URL is malformed.
        """
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url: expected http:// or ws://, got {url!r}")
        self._url, self._action, self._constants = url, action, dict(constants or {})
        self._observation = observation
        self._unreadable_reward = unreadable_reward
        self._num_unreadable = 0
        self._client = GenericEnvClient(
            url, connect_timeout_s=connect_s, message_timeout_s=answer_s, mode="simulation"
        )

    @classmethod
    @override
    def prepare(cls, **options: Any) -> None:
        """Connect to the server once."""

        async def check() -> None:
            environment = cls(**options)
            try:
                await environment._client.connect()
            except ConnectionError as error:
                raise ConfigError(f"OpenEnv server {environment._url}: {error}") from error
            finally:
                await environment.close()

        asyncio.run(check())

    @override
    async def reset(self, prompt: Prompt) -> Messages:
        """Begin the episode that the prompt's seed names."""
        named = prompt.extra_info.get(_RESET_OPTIONS)
        options = dict(named) if isinstance(named, Mapping) else {}
        try:
            result = await self._client.reset(**{"seed": episode_seed(prompt), **options})
        except Exception as error:
            raise self._unavailable(error) from error
        return opening(prompt, observed_text(result.observation, self._observation))

    @override
    async def step(self, reply: Reply) -> Step:
        """Send a reply as an action."""
        try:
            action = action_of(reply.text, self._action, self._constants)
            result = await self._client.step(action)
        except ValueError as error:
            return self._again(str(error))
        except RuntimeError as error:  # an error of the server
            if f"(code: {WSErrorCode.VALIDATION_ERROR.value})" not in str(error):
                raise self._unavailable(error) from error
            return self._again("That is no action that the environment takes.")
        except Exception as error:
            raise self._unavailable(error) from error
        done = bool(result.done)
        return Step(
            messages=() if done else observed_text(result.observation, self._observation),
            reward=result.reward,
            done=done,
            parts={"unreadable": float(self._num_unreadable)},
        )

    @override
    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _again(self, reason: str) -> Step:
        self._num_unreadable += 1
        parts = {"unreadable": float(self._num_unreadable)}
        return Step(messages=reason, reward=self._unreadable_reward, parts=parts)

    def _unavailable(self, error: Exception) -> Unavailable:
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_SHOWN]
        return Unavailable(f"OpenEnv server {self._url}: {reason}")


def action_of(text: str, key: str, constants: Mapping[str, Json]) -> dict[str, Json]:
    """Return the action that a reply means.

    Raises:
        ValueError: the reply is no JSON object, and no key is named; the text is for the policy.
    """
    if key:
        return {**constants, key: text}
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        action = None
    if not isinstance(action, dict):
        raise ValueError("That is no action: expected one JSON object and nothing else.")  # noqa: TRY004 of the policy
    return {**constants, **action}


def observed_text(observation: Json, keys: str) -> str:
    """Return an observation as text: the value at ``keys``, or the whole observation as JSON.

    Raises:
        TypeError: there is no value at these keys.
    """
    value = observation
    if not keys and isinstance(value, Mapping):
        value = {key: inner for key, inner in value.items() if key not in _IGNORED}
    for key in keys.split(".") if keys else ():
        if not isinstance(value, Mapping) or key not in value:
            shown = json.dumps(observation)[:_LONGEST_SHOWN]
            raise TypeError(f"options.observation = {keys!r} is not in the observation {shown}")
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
