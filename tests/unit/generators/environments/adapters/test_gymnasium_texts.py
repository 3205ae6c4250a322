import re

import numpy as np
import pytest
from gymnasium import spaces

from slipstream.generators.environments.adapters.gymnasium import (
    action_of,
    chosen_text,
    text_of,
    unspoken,
    without_colors,
)


def test_observations_are_text_or_json():
    for value, text in [
        ("a board", "a board"),
        (np.int64(7), "7"),
        ((1, np.float32(0.5), True), "[1, 0.5, true]"),
        ({"said": "ä", 3: None}, '{"said": "ä", "3": null}'),
    ]:
        assert text_of(value, "it") == text


@pytest.mark.parametrize("value", [b"\xff", np.zeros(2), {"x": object()}, [np.zeros((1, 1))]])
def test_what_no_text_holds_is_named(value: object):
    with pytest.raises(TypeError, match=r"it.* is .*, expected text"):
        text_of(value, "it")


def test_the_last_match_of_a_pattern_is_the_action():
    for pattern, reply, found in [
        ("", "  go ", "go"),
        (r"<a>(.*?)</a>", "<a>1</a> no, <a> 2 </a>", "2"),
        (r"\d+", "1 or 22", "22"),
        (r"\d+", "none", ""),
    ]:
        assert chosen_text(re.compile(pattern), reply) == found


def test_a_choice_is_a_number_or_a_name():
    assert action_of(spaces.Discrete(3, start=-1), "-1", ()) == -1
    assert action_of(spaces.Discrete(2), "RIGHT", ("left", "right")) == 1
    for text in ("2", "", "1.0", "9" * 30):
        with pytest.raises(ValueError, match="a number from 0 to 1"):
            action_of(spaces.Discrete(2), text, ())


def test_spaces_of_arrays_are_no_text():
    for space, is_spoken in [
        (spaces.Text(9), True),
        (spaces.Tuple([spaces.Discrete(2), spaces.Dict({"a": spaces.Text(1)})]), True),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), False),
        (spaces.Box(0, 1, (2,)), False),
    ]:
        assert (unspoken(space) is None) == is_spoken


def test_what_a_terminal_colors_stands_in_brackets():
    assert without_colors("\n\x1b[41mS\x1b[0mF\n\x1b[2JG\n") == "[S]F\nG"
