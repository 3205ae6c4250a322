"""What an agent says is bounded before anything keeps it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from slipstream.weightbus.relay.member import bounded
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.weightbus import PUBLISH_PHASES, CommandOutcome

FIGURES = st.integers(-(2**63), 2**64 - 1)


def test_an_outcome_of_an_agent_is_kept_as_it_is():
    outcome = CommandOutcome(
        command_id=7,
        error="no room",
        num_in_flight=3,
        num_bytes=2**40,
        digest="d" * 32,
        phase_seconds={"load": 0.5, "verify": 0.0},
    )
    assert bounded(outcome) == outcome


def test_an_outcome_that_is_too_large_for_the_broker_becomes_small():
    huge = CommandOutcome(
        command_id=7,
        error="line\n\x1b[2J" * 1_000_000,
        digest="d" * 10_000_000,
        phase_seconds={f"phase-{i}": 1.0 for i in range(100_000)},
    )
    found = bounded(huge)
    assert len(encode(found)) < 1_000
    assert found.error.isprintable()
    assert found.error.startswith("line")


@given(
    num_bytes=FIGURES,
    num_in_flight=FIGURES,
    seconds=st.dictionaries(st.sampled_from(PUBLISH_PHASES) | st.text(), st.floats()),
)
def test_its_figures_can_be_summed_and_shown(
    num_bytes: int, num_in_flight: int, seconds: dict[str, float]
):
    outcome = CommandOutcome(
        command_id=1, num_bytes=num_bytes, num_in_flight=num_in_flight, phase_seconds=seconds
    )
    found = bounded(outcome)
    figures = [found.num_bytes, found.num_in_flight, *found.phase_seconds.values()]
    assert all(math.isfinite(one) and one >= 0 for one in figures)
    assert set(found.phase_seconds) <= set(PUBLISH_PHASES)
