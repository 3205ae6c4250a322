"""Gymnasium's environments, real ones of its own and toy ones, played in text."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from slipstream.generators.environments.host import EnvironmentFailedError
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.trajectory import ChatMessage, Json, Prompt
from tests.support.playing import heard, hosted, play, played

pytestmark = pytest.mark.integration
GAME = "slipstream.generators.environments.adapters.gymnasium:Game"
PAGE = Path(__file__).parents[2] / "docs" / "environments" / "gymnasium.md"
HERE = Path(__file__).parent / "environments" / "games.py"
ASKED = Prompt(prompt="Play.", extra_info={"seed": 3, "reset_options": {"word": "abc"}})
LAKE: dict[str, Json] = {
    "id": "FrozenLake-v1",
    "observe": "render",
    "kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


async def test_a_game_in_text_is_played_to_its_end():
    options: dict[str, Json] = {"make": f"{HERE}:Echo", "kwargs": {"most": 5}}
    found = await played(GAME, ASKED, "abc", "what?!", "cba", options=options)
    assert heard(found)[:2] == ["Play.\n\nsay abc backwards", "no"]
    assert str(heard(found)[2]).startswith("That is no action: expected 1 to 20 characters of")
    assert (found.ended_by, found.rewards) == ("environment", [0.0, 0.0, 1.0])
    assert found.parts == {"unreadable": 1.0}


async def test_a_board_is_drawn_and_actions_are_named():
    says = ["I go <act>right</act>", *["<act>right</act>"] * 1, "north", "<act>down</act>"]
    says += ["<act>Down</act>", "<act>down</act>", "<act>right</act>"]
    options = {**LAKE, "action_pattern": "<act>(.*?)</act>", "unreadable_reward": -0.5}
    prompt = Prompt(prompt=(ChatMessage("system", "Walk."), ChatMessage("user", "Go.")))
    found = await played(GAME, prompt, *says, options=options)
    boards = [str(one) for one in heard(found)]
    assert boards[0] == "Go.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert boards[1] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert boards[3] == "That is no action: expected one of left, down, right, up."
    assert (found.reward, found.ended_by) == (0.5, "environment")
    assert found.messages[0] == {"role": "system", "content": "Walk."}


async def test_siblings_have_the_same_episode_and_other_prompts_have_others():
    async with hosted(GAME, {"make": f"{HERE}:Echo"}) as host:
        prompts = [Prompt(prompt="Play.", row=row) for row in (0, 0, 1, 2)]
        firsts = [heard(await play(host, one, "a", "a", "a"))[0] for one in prompts]
    assert firsts[0] == firsts[1]
    assert len(set(firsts)) == 3


async def test_numbers_are_said_and_chosen():
    options = {"id": "Blackjack-v1"}
    found = await played(GAME, Prompt(prompt="", extra_info={"seed": 3}), "7", "0", options=options)
    assert heard(found) == ["[7, 10, 0]", "That is no action: expected a number from 0 to 1."]
    assert found.reward == 1.0


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({}, "the observation, key 'seen' is ndarray of shape .2, 2. and type float32, expected t"),
        ({"with_bytes": True}, "the observation, key 'seen' is bytes, expected text"),
    ],
)
async def test_an_observation_that_is_no_text_ends_a_trajectory_with_the_reason(
    kwargs: dict[str, Json], why: str
):
    options: dict[str, Json] = {"make": f"{HERE}:Lies", "kwargs": kwargs}
    with pytest.raises(EnvironmentFailedError, match=why):
        await played(GAME, ASKED, "abc", options=options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"make": f"{HERE}:Pictures"}, r"observations hold Box\(0, 255, \(8, 8, 3\), uint8\)"),
        ({"make": f"{HERE}:Continuous"}, r"actions are Box.*: expected Text or Discrete"),
        ({"make": f"{HERE}:not_one"}, "made str, expected gymnasium.Env"),
        ({"make": f"{HERE}:Echo", "actions": ["a"]}, "its actions are text"),
        ({"id": "Nothing-v0"}, "Environment `Nothing` doesn't exist"),
        ({"id": "CartPole-v1"}, "which is no text"),
        ({}, "expected one of id and make"),
        ({**LAKE, "actions": ["left"]}, "expected 4 names, got 1"),
        ({**LAKE, "observe": "pixels"}, "expected observation or render"),
    ],
)
async def test_what_cannot_be_played_in_text_is_refused_at_the_start(
    options: dict[str, Any], why: str
):
    with pytest.raises(ConfigError, match=why):
        async with hosted(GAME, options):
            pass


@pytest.mark.slow  # it needs a package that is not among ours; the games above are in `make test`
async def test_a_game_of_textarena_is_played_as_the_page_says(tmp_path: Path):
    spec = importlib.util.find_spec("textarena")
    if spec is None or spec.origin is None:
        pytest.skip("textarena is not installed: make test-slow")
    file = tmp_path / "arena.py"
    file.write_text(PAGE.read_text().partition("```python\n")[2].partition("```")[0])
    options: dict[str, Json] = {
        "make": f"{file}:Arena",
        "kwargs": {"game": "GuessTheNumber-v0-raw"},
    }
    folder = Path(spec.origin).parents[1]

    prompt = Prompt(prompt="", extra_info={"seed": 3})
    says = [f"[{number}]" for number in range(1, 11)]
    async with hosted(GAME, options, libraries=[folder]) as host:
        found = await play(host, prompt, *says)
        again = await play(host, prompt, "[20]", "five", "fifteen")
    assert str(heard(found)[0]).startswith("You are Player 0. You are playing Guess The Number.")
    assert "The target number is higher." in heard(found)
    assert found.ended_by == "environment"
    assert found.reward is not None
    assert found.reward > 0.0
    assert "lower" in str(heard(again)[1])
