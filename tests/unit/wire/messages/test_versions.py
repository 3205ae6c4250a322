import pytest

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.versions import PolicyVersion, parse_label, staleness_steps


def test_a_label_names_the_version_it_was_made_from():
    version = PolicyVersion(3, 142)
    assert version.label == "v3.142"
    assert parse_label(version.label) == version


def test_any_other_text_is_no_version():
    for label in ["", "default", "v1", "1.2", "v1.2.3", "v-1.2", " v1.2", "v1.2\n"]:
        with pytest.raises(ProtocolError, match=r"expected vEPOCH\.STEP"):
            parse_label(label)


def test_versions_of_a_run_are_ordered_by_epoch_before_step():
    assert PolicyVersion(1, 9) < PolicyVersion(2, 3) < PolicyVersion(2, 4)
    assert PolicyVersion(2, 3).next() == PolicyVersion(2, 4)


def test_staleness_is_counted_in_learner_steps():
    assert staleness_steps(learner_step=9, behavior=PolicyVersion(1, 7)) == 2
    assert staleness_steps(learner_step=7, behavior=PolicyVersion(1, 7)) == 0


def test_a_behavior_newer_than_the_learner_has_no_staleness():
    with pytest.raises(ValueError, match="newer than the learner's step 6"):
        staleness_steps(learner_step=6, behavior=PolicyVersion(1, 7))
