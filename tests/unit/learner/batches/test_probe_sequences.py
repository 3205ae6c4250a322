"""The sequences of a probe, and the settings of probes."""

import pytest

from slipstream.learner.batches.probe_sequences import probe_sequences
from slipstream.weightbus.config import weightbus_section
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.probe import ProbeLogprobs

FIRST = (721, 6911, 39894, 4377)


def sequences(seed: str, vocab_size: int = 49_152) -> tuple[tuple[int, ...], ...]:
    return probe_sequences(seed, vocab_size=vocab_size, count=4, length=48)


def test_sequences_are_those_of_their_run():
    assert sequences("a") == sequences("a")
    assert sequences("a") != sequences("b")
    assert sequences("a")[0][:4] == FIRST  # the same on any machine
    assert [len(one) for one in sequences("a")] == [48] * 4
    assert len({one[0] for one in sequences("a")}) == 4, "they share a prefix"


@pytest.mark.parametrize(("vocab_size", "highest"), [(20, 18), (3, 1), (1, 0)])
def test_tokens_are_of_the_vocabulary_but_the_last(vocab_size: int, highest: int):
    assert max(max(one) for one in sequences("a", vocab_size)) == highest


def test_a_probe_that_contradicts_itself_is_none():
    for num_context, logprobs, why in [
        (0, ((-1.0,) * 3,), "num_context = 0"),
        (3, ((),), "num_context = 3"),
        (1, ((-1.0,),), r"has logprobs \[1\]"),
        (1, ((-1.0, -1.0), (-1.0, -1.0)), r"1 sequences has logprobs \[2, 2\]"),
    ]:
        with pytest.raises(ValueError, match=why):
            ProbeLogprobs(sequences=((1, 2, 3),), logprobs=logprobs, num_context=num_context)


def test_settings_of_probes_are_checked():
    assert weightbus_section({}).probe_every == 1
    with pytest.raises(ConfigError, match="probe_limit"):
        weightbus_section({"weightbus": {"probe_limit": -0.1}})
    with pytest.raises(ConfigError, match="probe_tokens"):
        weightbus_section({"weightbus": {"probe_tokens": 1}})
