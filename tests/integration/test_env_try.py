"""`slipstream env try`: an environment, an engine and a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripted_policy import write_scripted_policy
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
_CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"at": {}}}}}\n</tool_call>'
ENVIRONMENT = '''
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step


def look(at: int) -> str:
    """Look at a place."""
    return f"a tree at {at}"


class Trees(Environment):
    tools = (look,)

    async def reset(self, prompt: Prompt) -> str:
        if prompt.ground_truth == "none":
            raise RuntimeError("no wood")
        return prompt.text

    async def step(self, reply: Reply) -> Step:
        results = [await self.call(call) for call in reply.tool_calls]
        return Step(messages=results, reward=0.5, done=not results, parts={"calls": len(results)})


async def rollout(client, prompt):
    for question in ("where?", "why?"):
        messages = [{"role": "user", "content": question}]
        await client.chat.completions.create(model="policy", messages=messages)
    return 1
'''
REPLIES = {  # tokens are in one reply only
    "good": [_CALL.format("look", 1)],
    "unknown": ["I use it. ", _CALL.format("Look", 2)],
    "unreadable": ["Let me see. ", _CALL.format("look", 3).replace("}}", "}")],
    "half": [
        "Two: ",
        _CALL.format("look", 4),
        "\n" + _CALL.format("look", 5).replace('"at"', "at"),
    ],
    "open": ["Open: ", _CALL.format("look", 6).removesuffix("\n</tool_call>")],
    "thought": ["<think>", "I could ", _CALL.format("look", 7), "but no", "</think>", "It is 23"],
    "never closed": ["<thi", "nk>Or ", _CALL.format("look", 9)],
    "tail": [_CALL.format("look", 8), " and then I am done"],
}
SETTINGS = (
    "environment.tool_call_parser=qwen25",
    "environment.max_turns=3",
    "environment.max_tokens=900",
    "sampling.max_response_tokens=8",
    "generators.max_cached_tokens=4096",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("try")
    write_scripted_policy(path / "model", [*REPLIES.values()], special=("<think>", "</think>"))
    (path / "my env.py").write_text(ENVIRONMENT)
    return path


def env_try(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "slipstream.deploy.main", "env", "try"),
            *("--model", str(folder / "model"), *words, *SETTINGS),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "COLUMNS": "100"},  # noqa: TID251 handed on
    )


def test_turns_and_calls_are_shown_as_they_come_and_what_fails_is_the_exit_code(folder: Path):
    """Each of the policy's replies, as parsers of a real engine read it."""
    rows = [{"prompt": "Where are the trees?", "ground_truth": ""}] * 40
    rows.append({"prompt": "Where are the trees?", "ground_truth": "none"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--n", "41", "data.file=rows.jsonl", "environment.reasoning_parser=qwen3")
    done = env_try(folder, "my env.py:Trees", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    for text in (
        "trajectory 41 of 41",
        "Where are the trees?",
        '-> look({"at": 1})',
        "tool\na tree at 1",
        '-> Look({"at": 2})',
        "error: there is no tool Look, only look",
        "calls of tools that there are not: 1",
        'Let me see. <tool_call>\n{"name": "look", "arguments": {"at": 3}\n</tool_call>',
        "calls that environment.tool_call_parser cannot read: 1",
        'Two: \n<tool_call>\n{"name": "look", "arguments": {at: 5}}\n</tool_call>\n-> look(',
        'Open: <tool_call>\n{"name": "look", "arguments": {"at": 6}}',
        "but no\nIt is 23",
        " and then I am done\n-> look",
        " tokens by the policy",
        "41 trajectories, mean reward ",
        "failed: RuntimeError: no wood",
    ):
        assert text in done.stdout, (text, done.stdout)
    for place in (7, 9):
        assert f'"at": {place}}}' in done.stdout
        assert f"a tree at {place}" not in done.stdout, "a call inside a thought was carried out"
    assert "Traceback" not in done.stdout + done.stderr


def test_an_agent_that_begins_anew_has_branches_and_programs_get_everything(folder: Path):
    done = env_try(folder, "my env.py:rollout", "--prompt", "x", "--n", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (one,) = found["trajectories"]
    assert (one["reward"], one["num_branches"], len(one["said"])) == (1.0, 2, 2)
    assert [said["asked"][0]["content"] for said in one["said"]] == ["where?", "why?"]


def test_a_template_that_depends_on_what_was_said_before_is_refused(folder: Path):
    template = folder / "counts.jinja"
    template.write_text(
        "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}<|end|>{% endfor %}"
        "{{ messages | length }}"
    )
    done = env_try(folder, "my env.py:Trees", "--prompt", "x", f"sampling.chat_template={template}")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [one for one in done.stderr.splitlines() if "after a reply the chat template" in one]
    assert "sampling.chat_template" in line
    assert "Traceback" not in done.stderr
