"""The agent quickstart's files, and what its policy imitates."""

import fnmatch
import json
import tomllib
from pathlib import Path

from tokenizers import Tokenizer

from docs.generate.policy.sums import write_blank_sums_model, write_demonstrations
from slipstream.deploy.examples.sums import SHIPPED_POLICY, Sums, prepare, problems
from slipstream.generators.environments.sdk import Environment, Prompt, Reply, Step, ToolCall
from slipstream.generators.text.chat_template import ChatTemplate
from slipstream.generators.turns.rendering import MessageRendering

ROOT = Path(__file__).parents[4]
MOST_BYTES = 2 * 2**20


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_problems_are_held_out_or_trained_and_have_three_numbers_of_two_digits(tmp_path: Path):
    prepare(tmp_path)
    held_out, train = (rows_of(tmp_path / f"{name}.jsonl") for name in ("held_out", "train"))
    assert len(held_out) == 256
    assert len({row["prompt"] for row in [*held_out, *train]}) == len(problems()) == 8192
    for row in [*held_out, *train]:
        numbers = row["prompt"].removesuffix("=").split("+")
        assert [len(number) for number in numbers] == [2, 2, 2]
        assert sum(map(int, numbers)) == int(row["ground_truth"])


def test_the_policy_is_small_package_data_and_as_the_command_describes_it(tmp_path: Path):
    files = {path.name: path.read_bytes() for path in SHIPPED_POLICY.iterdir()}
    assert sum(map(len, files.values())) <= MOST_BYTES
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["slipstream.deploy.examples"]
    assert all(any(fnmatch.fnmatch(f"sums_policy/{n}", p) for p in patterns) for n in files)
    write_blank_sums_model(tmp_path)
    for path in tmp_path.iterdir():
        assert files[path.name].split() == path.read_bytes().split(), path.name


def test_its_template_goes_on_after_a_reply_and_demonstrations_are_what_it_renders(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(SHIPPED_POLICY / "tokenizer.json"))
    source = (SHIPPED_POLICY / "chat_template.jinja").read_text()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    rendering = MessageRendering(
        ChatTemplate(source, {}, origin="sums"),
        encode,
        lambda one: tokenizer.decode([one], skip_special_tokens=False),
        {tokenizer.token_to_id("<eos>")},
    )
    rendering.check(uses_tools=True)
    write_demonstrations(tmp_path)
    first, second, *_ = rows_of(tmp_path / "held_out.jsonl")
    problem = problems()[0]
    asked = rendering.first([{"role": "user", "content": "+".join(map(str, problem)) + "="}])
    assert asked == encode(first["prompt"])
    said = encode(first["ground_truth"] + "<eos>")
    result = {"role": "tool", "content": str(problem[0] + problem[1])}
    assert [*asked, *said, *rendering.following(said, [result])] == encode(second["prompt"])


async def test_a_tool_adds_two_numbers_and_the_answer_is_rewarded():
    environment: Environment = Sums()
    first = await environment.reset(Prompt(prompt="10+20+30=", ground_truth="60"))
    assert first == "10+20+30="
    call = ToolCall("add", {"a": 10, "b": 20}, "c1")
    steps = [await environment.step(Reply("", tool_calls=(call,)))]
    steps += [await environment.step(Reply(text)) for text in ("60", "61")]
    called, right, wrong = [step for step in steps if isinstance(step, Step)]
    assert called.messages == [{"role": "tool", "tool_call_id": "c1", "content": "30"}]
    assert (called.done, called.reward) == (False, 0.0)
    assert (right.done, right.reward, right.parts) == (True, 1.0, {"calls": 1})
    assert wrong.reward == 0.0
