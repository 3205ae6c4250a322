from slipstream.deploy.preflight.check.clock import Offset, judge_clock, measure


def test_an_offset_that_the_round_trip_does_not_explain_is_a_warning():
    assert judge_clock(Offset(0.9, 0.001)).outcome == "ok"
    assert judge_clock(Offset(-1.2, 0.001)).outcome == "warn"
    assert judge_clock(Offset(1.2, 0.5)).outcome == "ok", "it may be 0.95 s"
    assert judge_clock(Offset(90.0, 0.5)).found.startswith("+90.000 s against the host")


def test_the_quickest_reading_counts():
    ticks = iter([0.0, 3.0, 0.0, 0.2, 0.0, 3.0, 0.0, 3.0, 0.0, 3.0])
    found = measure(lambda: 1090.0, now=lambda: 1000.0, seconds=lambda: next(ticks))
    assert (round(found.offset_s, 3), found.round_trip_s) == (89.9, 0.2)
