"""A recorded trajectory in parts: turns, the context between, and where branches begin."""

from slipstream.wire.files.trained_parts import (
    Excerpt,
    TrajectoryPart,
    called_tools,
    excerpt,
    parts_of,
    versions_of,
)


def test_one_turn_is_one_part():
    assert parts_of([1, 1, 2, 2], [(2, 2)], []) == [TrajectoryPart(first_token=2, end=4, turn=1)]


def test_context_stands_between_turns_and_a_branch_says_what_it_shares_with_which():
    first = [1, 1, 20, 3, 21]
    second = [1, 1, 20, 4, 22]
    third = [1, 7, 23]
    fourth = [1, 1, 20, 4, 22, 5, 24]
    ids = [*first, *second, *third, *fourth]
    turns = [(2, 1), (4, 1), (9, 1), (12, 1), (19, 1)]
    assert parts_of(ids, turns, [5, 10, 13]) == [
        TrajectoryPart(first_token=2, end=3, turn=1),
        TrajectoryPart(first_token=3, end=4),
        TrajectoryPart(first_token=4, end=5, turn=2),
        TrajectoryPart(first_token=5, end=9, branch=2, num_shared=3, shared_with=1),
        TrajectoryPart(first_token=9, end=10, turn=3),
        TrajectoryPart(first_token=10, end=12, branch=3, num_shared=1, shared_with=2),
        TrajectoryPart(first_token=12, end=13, turn=4),
        TrajectoryPart(first_token=13, end=19, branch=4, num_shared=5, shared_with=2),
        TrajectoryPart(first_token=19, end=20, turn=5),
    ]


def test_what_a_branch_shares_ends_where_its_reply_begins():
    again = parts_of([1, 2, 5, 1, 2, 5], [(2, 1), (5, 1)], [3])
    assert again[1] == TrajectoryPart(first_token=3, end=5, branch=2, num_shared=2, shared_with=1)


def test_a_turn_names_the_versions_of_its_own_tokens():
    runs = [(2, "v1.1"), (4, "v1.2"), (9, "v1.3")]
    turns = [
        TrajectoryPart(first_token=2, end=5, turn=1),
        TrajectoryPart(first_token=7, end=9, turn=2),
    ]
    assert [versions_of(turn, runs) for turn in turns] == [["v1.1", "v1.2"], ["v1.2"]]
    assert versions_of(TrajectoryPart(first_token=9, end=11, turn=3), runs) == ["v1.3"]


def test_calls_of_tools_are_named_as_templates_write_them():
    for reply, calls in [
        ("none at all", {}),
        ('{"name": "a"}', {}),
        ('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', {"a": 1}),
        ('<tool_call>{"name":"a"}</tool_call><tool_call>{"name":"b"}', {"a": 1, "b": 1}),
        ("<tool_call>\n<function=a_b>\n<parameter=x>", {"a_b": 1}),
        ("<tool_call>a-b\n<arg_key>x</arg_key>", {"a-b": 1}),
        ('[TOOL_CALLS] [{"name": "a", "arguments": {}}]', {"a": 1}),
        ('<|python_tag|>{"name": "a", "parameters": {}}', {"a": 1}),
        ("<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}", {"a": 1}),
        ("\uff5ctool\u2581sep\uff5c>a", {}),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>a\n", {"a": 1}),
        ("<function=a>" * 40, {"a": 40}),
    ]:
        assert called_tools(reply) == calls


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert excerpt("abcd", 4) == Excerpt("abcd")
    assert excerpt("abcdefgh", 4) == Excerpt("abc", 4, "h")
    assert excerpt("abcdefgh", 0) == Excerpt("", 8, "")
