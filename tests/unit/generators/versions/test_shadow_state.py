"""What a shadow may do, over every order of questions, ends of loads and ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generators.versions.shadow_state import (
    Readiness,
    ShadowState,
    ask,
    check_adoptable,
    ended,
    has_room,
)
from slipstream.wire.errors import PublishError


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("vwx")),
            st.tuples(st.just("end"), st.sampled_from([None, "", "it is torn"])),
            st.tuples(st.just("adopt"), st.sampled_from("vwx")),
        ),
        max_size=40,
    )
)
def test_only_what_was_loaded_whole_and_last_is_ever_adopted(events: list[tuple[str, str | None]]):
    state = ShadowState()
    loading: str | None = None  # the one load that writes to the memory
    in_memory: str | None = None  # version that the memory holds, whole
    for event in events:
        match event:
            case "ask", str(value):
                step = ask(state, value)
                state = step.state
                if step.begins:
                    assert loading is None, "two loads write at a time"
                    loading, in_memory = value, None
                assert (step.readiness is Readiness.READY) == (in_memory == value)
                assert not step.why or step.readiness is Readiness.FAILED
            case "end", why if loading is not None:
                in_memory = loading if why is None and not state.is_unwanted else None
                state, loading = ended(state, why), None
            case "adopt", str(value):
                if in_memory == value:
                    check_adoptable(state, value)
                else:
                    with pytest.raises(PublishError, match=f"not {value}"):
                        check_adoptable(state, value)
            case _:
                pass


def test_a_version_is_there_after_few_questions():
    state = ask(ask(ShadowState(), "v").state, "w").state  # the first load is given up
    step = ask(ended(state, None), "w")
    assert step.begins
    assert ask(ended(step.state, None), "w").readiness is Readiness.READY


def test_a_failure_is_told_once_and_then_tried_again():
    failed = ask(ended(ask(ShadowState(), "v").state, "torn"), "v")
    assert (failed.readiness, failed.why) == (Readiness.FAILED, "torn")
    assert ask(failed.state, "v").begins


@pytest.mark.parametrize(("free", "fits"), [(40.0, True), (39.9, False), (-1.0, False)])
def test_a_shadow_leaves_three_quarters_to_the_cache(free: float, fits: bool):
    assert has_room(10.0, free=free) == fits
    assert not has_room(0.0, free=free), "an engine without weights"
