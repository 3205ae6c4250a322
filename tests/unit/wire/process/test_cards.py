from slipstream.wire.process.cards import difference, flat


def test_what_only_one_of_them_knows_is_a_difference_and_a_line_names_three():
    ours = dict.fromkeys("abcde", "1")
    assert difference(ours, {}) == (
        "a is unknown there, expected 1; b is unknown there, expected 1; "
        "c is unknown there, expected 1; and 2 more"
    )
    assert difference({}, {"z": "3"}) == "z is 3 there, expected nothing"


def test_a_section_is_compared_by_its_settings():
    section = {"b": {"y": 1, "x": "text"}, "a": [True], "none": {}}
    assert flat("learner", section) == {
        "learner.a": "[true]",
        "learner.b.x": "text",
        "learner.b.y": "1",
        "learner.none": "{}",
    }
