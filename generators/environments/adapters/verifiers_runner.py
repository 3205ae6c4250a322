"""Runs environments of verifiers. A script for a Python that has verifiers installed.

It imports the standard library and verifiers only, nothing of the package around it. It reads one
request, a line of JSON, from stdin, and writes answers to stdout, a line of JSON each:

    {"kind": "check", "env": {...}, "path": [...]}
        -> {"kind": "ready", "version": "0.4.0"}
    {"kind": "tasks", "env": {...}, "path": [...], "limit": 100}
        -> {"kind": "task", "task": {...}, "prompt": "...", "system_prompt": null}, once for each
        -> {"kind": "ready", "version": "0.4.0"}
    {"kind": "run", "env": {...}, "path": [...], "task": {...},
     "url": "http://127.0.0.1:1234/v1", "api_key": "...", "model": "policy"}
        -> {"kind": "done", "reward": 1.0, "metrics": {"turns": 2.0}}

and ``{"kind": "failed", "reason": "..."}`` instead of the last one. ``env`` is the table [env] of a
run of verifiers, ``path`` are folders in which modules are found, ``task`` is what ``tasks`` gave.
What else is printed goes to stderr.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

_KEY = "ENDPOINT_SECRET"  # a variable; programs of an agent do not get it from verifiers
_LONGEST_REASON = 1_000


def environment_of(request: dict[str, Any]) -> Any:  # noqa: ANN401 foreign
    """Make the environment that a request names."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(request["env"]))


def ready() -> dict[str, Any]:
    """Return the answer that all is well."""
    import verifiers

    return {"kind": "ready", "version": verifiers.__version__}


def check(request: dict[str, Any], _replies: TextIO) -> dict[str, Any]:
    """Make the environment."""
    environment_of(request)
    return ready()


def tasks(request: dict[str, Any], replies: TextIO) -> dict[str, Any]:
    """Write the tasks of the environment's taskset."""
    taskset = environment_of(request).taskset
    for task in itertools.islice(taskset, request["limit"]):
        data = task.data.model_dump(mode="json", exclude_none=True)
        answer = {"kind": "task", "task": data, "prompt": task.data.prompt_text}
        answer["system_prompt"] = task.data.system_prompt
        replies.write(json.dumps(answer) + "\n")
    return ready()


def run(request: dict[str, Any], _replies: TextIO) -> dict[str, Any]:
    """Run one episode of a task; its reward is the mean of the agents that are trained."""
    import verifiers.v1 as vf

    environment = environment_of(request)
    task_type = type(environment.taskset).task_type()
    data = task_type.data_type().model_validate(request["task"])
    task = task_type(data, environment.config.taskset.task)
    os.environ[_KEY] = request["api_key"]  # noqa: TID251 verifiers reads it there
    client = vf.EvalClientConfig(base_url=request["url"], api_key_var=_KEY)
    context = vf.ModelContext(model=request["model"], client=client)

    async def play() -> Any:  # noqa: ANN401 foreign
        async with environment.serving():
            return await environment.run_episode(task, context)

    episode = asyncio.run(play())
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or not traces:
        errors = [*episode.errors]
        errors += [error for trace in episode.traces for error in trace.errors]
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "no agent is trained"
        return {"kind": "failed", "reason": reason}
    metrics: dict[str, float] = {}
    for trace in traces:
        rewards_of = trace.rewards.items()
        named = {name: reward.value for name, reward in rewards_of if reward is not None}
        values = {**trace.metrics, **named}.items()
        metrics |= {name: float(value) for name, value in values if value}
    rewards = [float(trace.reward) for trace in traces]
    return {"kind": "done", "reward": sum(rewards) / len(rewards), "metrics": metrics}


def main() -> None:
    """Answer one request."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries is no answer
    os.environ.pop("PYTHONPATH", None)  # noqa: TID251 it is another Python's
    try:
        request = json.loads(sys.stdin.readline())
        sys.path[:0] = request["path"]
        does = {"check": check, "tasks": tasks, "run": run}[request["kind"]]
        answer = does(request, replies)
    except BaseException as error:  # noqa: BLE001 foreign code may raise anything
        answer = {"kind": "failed", "reason": f"{type(error).__name__}: {error}"}
    if "reason" in answer:
        answer["reason"] = answer["reason"][:_LONGEST_REASON]
    replies.write(json.dumps(answer) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
