"""What the page draws of several turns is in order, whole where it is short, and bounded."""

import msgspec

from slipstream.broker.dashboard.turn_spans import (
    MAX_CONTEXT,
    MAX_DRAWN,
    MAX_ONE_CONTEXT,
    MAX_STRETCHES,
    drawn,
)
from slipstream.broker.history.trajectories import Stretch, TrainedRow, TurnTokens, VersionTokens
from slipstream.wire.files.trained_parts import Excerpt

OBSERVATION = 8 << 20  # characters


def row_of(*turns: tuple[list[str], list[str]], branches: tuple[int, ...] = ()) -> TrainedRow:
    """One whose turns are (texts of context, texts of the reply), the first context its prompt."""
    texts: list[str] = []
    chosen, starts = [], []
    for number, (context, reply) in enumerate(turns):
        if number in branches:
            starts.append(len(texts))
        texts += context
        chosen.append(TurnTokens(len(texts), len(reply)))
        texts += reply
    first = chosen[0].first_token
    known = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return TrainedRow(
        step=5,
        group_id=1,
        sibling=0,
        prompt="".join(texts[:first]),
        answer="".join(texts[first:]),
        reward=1.0,
        num_prompt_tokens=first,
        token_ids=[known[text] for text in texts],
        version_runs=[VersionTokens(first, "v1.4", 4)],
        logprob_diffs=[0.0] * (len(texts) - first),
        token_texts=texts[first:],
        turns=chosen,
        turn_rewards=[float(number) for number in range(len(turns))],
        branches=starts,
    )


def test_turns_and_context_are_in_order_and_a_branch_folds_what_is_known():
    row = row_of(
        (["p"], ["<function=", "look>", "."]),
        (["it is 7"], ["b"]),
        (["p", "in short"], ["c"]),
        branches=(2,),
    )
    row = msgspec.structs.replace(
        row, token_texts=["<function=", "look>", ".", *row.token_texts[3:]]
    )
    stretches, tokens = drawn(row)
    assert [token.text for token in tokens] == ["<function=", "look>", ".", "b", "c"]
    assert stretches == [
        Stretch(num_tokens=3, turn=1, num_drawn=3, reward=0.0, calls={"look": 1}),
        Stretch(num_tokens=1, text=Excerpt("it is 7")),
        Stretch(num_tokens=1, turn=2, num_drawn=1, reward=1.0),
        Stretch(
            num_tokens=2,
            text=Excerpt("in short"),
            branch=2,
            num_shared=1,
            shared_with=1,
            shared=Excerpt("p"),
        ),
        Stretch(num_tokens=1, turn=3, num_drawn=1, reward=2.0),
    ]


def test_one_turn_of_a_row_of_before_there_were_turns_is_drawn():
    row = row_of((["p"], ["a", "b"]))
    stretches, tokens = drawn(msgspec.structs.replace(row, turns=[], turn_rewards=[]))
    assert stretches == [Stretch(num_tokens=2, turn=1, num_drawn=2)]
    assert [token.text for token in tokens] == ["a", "b"]


def test_a_long_observation_is_cut_and_counted():
    stretches, _ = drawn(row_of((["p"], ["a"]), (["x" * OBSERVATION], ["b"])))
    text = stretches[1].text
    assert text is not None
    assert text.num_cut == OBSERVATION - MAX_ONE_CONTEXT
    assert len(msgspec.json.encode(stretches)) < 2 * MAX_ONE_CONTEXT


def test_many_turns_and_tokens_are_bounded():
    turns = [(["x" * 9_000], ["a"]) for _ in range(3 * MAX_STRETCHES)]
    stretches, tokens = drawn(row_of(*turns))
    assert len(tokens) <= MAX_STRETCHES
    assert sum(len(one.text.head) for one in stretches if one.text is not None) <= MAX_CONTEXT

    long = ["a"] * (MAX_DRAWN - 5)
    stretches, tokens = drawn(row_of((["p"], long), (["c"], ["b"] * 9)))
    assert len(tokens) == MAX_DRAWN
    assert [(one.num_tokens, one.num_drawn) for one in stretches if one.turn] == [
        (len(long), len(long)),
        (9, 5),
    ]
