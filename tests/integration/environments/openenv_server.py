"""A toy OpenEnv server that echoes: python openenv_server.py PORT SESSIONS."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str = Field(..., max_length=10)


class Echoed(Observation):
    echoed_message: str = ""
    inner: dict[str, Any] = Field(default_factory=dict)


class Echo(Environment[Say, Echoed, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="0", step_count=0)

    def reset(self, seed: int | None = None) -> Echoed:  # type: ignore[override]
        return Echoed(echoed_message=f"ready {seed}", reward=0.0, done=False)

    def step(self, action: Say) -> Echoed:  # type: ignore[override]
        if action.message == "crash":
            raise RuntimeError("it broke")
        self._state.step_count += 1
        echoed = Echoed(echoed_message=action.message, inner={"count": self._state.step_count})
        echoed.reward = len(action.message) / 10
        echoed.done = action.message == "end"
        return echoed

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Echoed, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
