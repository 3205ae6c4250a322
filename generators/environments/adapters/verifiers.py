"""Environments of verifiers, run by another Python, because its pins differ from ours.

    [environment]
    function = "slipstream.generators.environments.adapters.verifiers:rollout"
    options.python = ".verifiers/bin/python"
    options.env = { taskset = { id = "my-taskset" }, agent = { runtime = { type = "subprocess" } } }

Each trajectory starts ``verifiers_runner.py``, which plays one episode against the endpoint that
records the policy's tokens. Prompts carry their task; this makes a data file of them:

    python -m slipstream.generators.environments.adapters.verifiers --python .verifiers/bin/python \
        --env '{"taskset": {"id": "my-taskset"}}' --out prompts.jsonl
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.generators.environments.sdk import Prompt, Unavailable
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import Json

TASK_KEY = "verifiers_task"  # key in a prompt's extra_info
_RUNNER = Path(__file__).with_name("verifiers_runner.py")
_CHECK_S = 300.0
_MOST_LINE_BYTES = 8 << 20
_MODEL = "policy"


def prepare(*, python: str, env: Mapping[str, Json], path: Sequence[str] = ()) -> None:
    """Have the other Python make the environment once.

    Raises:
        ConfigError: it does not exist, has no verifiers, or cannot make the environment.
    """
    answers = asked(python, {"kind": "check", **request_of(env, path)})
    if answers[-1]["kind"] != "ready":
        raise ConfigError(f"verifiers: {answers[-1].get('reason', 'no answer')}")


async def rollout(
    client: Any,  # noqa: ANN401 openai's
    prompt: Prompt,
    *,
    python: str,
    env: Mapping[str, Json],
    path: Sequence[str] = (),
) -> dict[str, float]:
    """Play the prompt's task.

    Args:
        client: Client with endpoint and key of the policy.
        prompt: Prompt with a task of verifiers in ``extra_info``.
        python: Interpreter that has verifiers installed.
        env: Table [env] of a run of verifiers.
        path: Folders in which the interpreter looks for modules first.

    Raises:
        ValueError: the prompt has no task.
        Unavailable: the episode failed, or gave no reward.
    """
    task = prompt.extra_info.get(TASK_KEY)
    if not isinstance(task, dict):
        raise ValueError(  # noqa: TRY004 of a data file
            f"extra_info of the prompt holds no {TASK_KEY}: make the data file with "
            "python -m slipstream.generators.environments.adapters.verifiers"
        )
    request = {"kind": "run", **request_of(env, path), "task": task, "model": _MODEL}
    request |= {"url": str(client.base_url), "api_key": str(client.api_key)}
    process = await asyncio.create_subprocess_exec(
        *command(python),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MOST_LINE_BYTES,
    )
    if process.stdin is None or process.stdout is None:
        raise Unavailable("verifiers: its process has no streams")
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.close()
        answer = answer_of(await process.stdout.readline())
    except (OSError, ValueError) as error:
        raise Unavailable(f"verifiers: {error}") from error
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    if answer["kind"] != "done":
        raise Unavailable(f"verifiers: {answer.get('reason', 'no answer')}")
    return {**answer["metrics"], "score": answer["reward"]}


def command(python: str) -> list[str]:
    """Return the command of a runner: isolated from our modules and variables."""
    return [python, "-I", str(_RUNNER)]


def request_of(env: Mapping[str, Json], path: Sequence[str]) -> dict[str, Json]:
    """Return the fields of all requests, with absolute folders."""
    return {"env": dict(env), "path": [str(Path(folder).resolve()) for folder in path]}


def answer_of(line: bytes) -> dict[str, Any]:
    """Return an answer of a runner.

    Raises:
        ValueError: the line is no answer.
    """
    if not line:
        raise ValueError("its process ended without an answer")
    answer = json.loads(line)
    if not isinstance(answer, dict) or "kind" not in answer:
        raise ValueError(f"its process gave no answer but {line[:200]!r}")
    return answer


def asked(python: str, request: Mapping[str, Json]) -> list[dict[str, Any]]:
    """Return all answers of a runner to a request.

    Raises:
        ConfigError: there is no answer.
    """
    try:
        done = subprocess.run(  # noqa: S603 the interpreter that a setting names
            command(python),
            input=json.dumps(request).encode() + b"\n",
            stdout=subprocess.PIPE,
            timeout=_CHECK_S,
            check=False,
        )
        answers = [answer_of(line) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"verifiers: {python} cannot be run: {error}") from error
    if not answers:
        raise ConfigError(
            f"verifiers: {python} gave no answer and ended with code {done.returncode}; its "
            "environment is made by `pip install 'slipstream[env-verifiers]'`, or verifiers alone"
        )
    return answers


def row_of(answer: Mapping[str, Any]) -> dict[str, Json]:
    """Return a row of a data file for a task."""
    messages = [{"role": "user", "content": answer["prompt"] or ""}]
    if answer["system_prompt"]:
        messages.insert(0, {"role": "system", "content": answer["system_prompt"]})
    return {"prompt": messages, "extra_info": {TASK_KEY: answer["task"]}}


def main() -> int:
    """Write the tasks of a taskset as a data file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--python", required=True, help="interpreter that has verifiers")
    parser.add_argument("--env", required=True, type=json.loads, help="table env as JSON")
    parser.add_argument("--path", action="append", default=[], help="folder of modules")
    parser.add_argument("--limit", type=int, default=100_000, help="tasks at most")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.jsonl")
    arguments = parser.parse_args()
    request = {"kind": "tasks", **request_of(arguments.env, arguments.path)}
    request["limit"] = arguments.limit
    try:
        *tasks, last = asked(arguments.python, request)
    except ConfigError as error:
        parser.error(str(error))
    if last["kind"] != "ready":
        parser.error(str(last.get("reason")))
    rows = [json.dumps(row_of(task)) + "\n" for task in tasks]
    arguments.out.write_text("".join(rows))
    sys.stderr.write(f"{len(tasks)} prompts in {arguments.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
