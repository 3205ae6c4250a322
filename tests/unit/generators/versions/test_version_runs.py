import pytest

from slipstream.generators.versions.version_runs import VersionSpan, version_runs, version_starts
from slipstream.wire.errors import EngineError
from slipstream.wire.messages.trajectory import VersionRun
from slipstream.wire.messages.versions import PolicyVersion

V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)


def spans(*parts: tuple[str, int, int]) -> list[VersionSpan]:
    return [VersionSpan(version=version, start=start, end=end) for version, start, end in parts]


def test_spans_of_equal_versions_are_one_run():
    reported = spans(("v1.3", 0, 2), ("v1.3", 2, 5), ("v1.4", 5, 6), ("v1.4", 6, 9))
    assert version_starts(reported, 9) == [(0, V3), (5, V4)]


def test_a_version_that_comes_back_is_a_run_of_its_own():
    reported = spans(("v1.3", 0, 2), ("v1.4", 2, 3), ("v1.3", 3, 4))
    assert version_starts(reported, 4) == [(0, V3), (2, V4), (3, V3)]


def test_gaps_and_overlaps_are_an_error_of_the_engine():
    for reported in [
        spans(("v1.3", 1, 4)),
        spans(("v1.3", 0, 2), ("v1.4", 3, 4)),
        spans(("v1.3", 0, 3), ("v1.4", 2, 4)),
        spans(("v1.3", 0, 0), ("v1.4", 0, 4)),
        spans(("v1.3", 0, 4), ("v1.4", 4, 2)),
    ]:
        with pytest.raises(EngineError, match="gap or overlap"):
            version_starts(reported, 4)


def test_every_token_has_a_version_and_no_other():
    for reported, covered in [(spans(("v1.3", 0, 3)), 3), (spans(("v1.3", 0, 5)), 5), ([], 0)]:
        with pytest.raises(EngineError, match=f"cover {covered} of 4 tokens"):
            version_starts(reported, 4)


def test_a_label_that_is_no_version_is_quoted():
    with pytest.raises(EngineError, match=r"'default', expected vEPOCH\.STEP"):
        version_starts(spans(("default", 0, 4)), 4)


def test_runs_are_shifted_behind_the_prompt():
    assert version_runs([(0, V3), (5, V4)], num_prompt_tokens=7) == (
        VersionRun(7, V3),
        VersionRun(12, V4),
    )
