import dataclasses
from functools import cache

import msgspec
import pytest

from slipstream.deploy.predict.advise.expect import Advice, advise
from slipstream.deploy.predict.advise.fit import fit, lengths_of
from slipstream.deploy.predict.advise.record import Record
from slipstream.deploy.predict.laws.engine_law import EngineLaw
from slipstream.deploy.predict.laws.learner_law import LearnerLaw
from slipstream.deploy.predict.simulate.lengths import Fixed
from slipstream.deploy.predict.simulate.scenario import Scenario
from slipstream.deploy.predict.simulate.world import simulate
from slipstream.wire.errors import ConfigError
from tests.support.recorded_runs import LAW, a_scenario, pace_of, recorded

QUICK_LEARNER = LearnerLaw(step_s=1.0, token_s=1e-4)
SLOW_LEARNER = LearnerLaw(step_s=60.0)
FEW = {"groups_per_step": 2, "group_size": 4, "max_sequences": 4}  # a quick advice


@cache
def advised(scenario: Scenario) -> Advice:
    return advise(recorded(scenario))


def few_recorded(**changes: object) -> Record:
    return recorded(a_scenario(**FEW, **changes))


def test_the_laws_that_a_run_followed_are_found():
    found = fit(recorded(a_scenario()))
    (law,) = found.engines
    assert law.base_s == pytest.approx(LAW.base_s)
    assert law.sequence_s == pytest.approx(LAW.sequence_s)
    assert found.learner.step_s == pytest.approx(1.0, rel=0.02)
    assert found.learner.token_s == pytest.approx(1e-4, rel=0.02)


def test_a_run_with_one_change_is_predicted():
    for change, named, learner in [
        ({"engines": 3}, "one more generator", QUICK_LEARNER),
        ({"engines": 3}, "one more generator", SLOW_LEARNER),
        ({"engines": 1}, "one fewer generator", SLOW_LEARNER),
        ({"max_staleness_steps": 1}, "a bound of 1", SLOW_LEARNER),
        ({"max_staleness_steps": 3}, "a bound of 3", QUICK_LEARNER),
        ({"publish_every": 2}, "a publish every 2 steps", QUICK_LEARNER),
    ]:
        scenario = a_scenario(learner=learner)
        told = advised(scenario)
        other: Scenario = dataclasses.replace(scenario, seed=9, **change)
        truth_s = simulate(other).mean_step_s(8)
        (found,) = [one for one in told.changes if one.change.startswith(named)]
        assert found.step_s == pytest.approx((truth_s, truth_s), rel=0.1)
        assert not told.cautions


def test_what_more_generators_bring_is_said_in_a_sentence():
    assert "one more generator (3 in all) makes it" in advised(a_scenario()).sentence
    learner_bound = advised(a_scenario(learner=SLOW_LEARNER)).sentence
    assert "none of these changes" in learner_bound
    assert "one fewer generator (1 in all) costs next to nothing" in learner_bound


def test_engines_that_always_computed_as_many_leave_a_range_that_holds_the_truth():
    scenario = a_scenario()
    told = advise(recorded(scenario, sequences=(50, 50)))
    truth_s = simulate(dataclasses.replace(scenario, engines=3)).mean_step_s(8)
    more = next(one for one in told.changes if one.change.startswith("one more"))
    assert more.step_s[0] < more.step_s[1]
    assert more.step_s[0] * 0.97 < truth_s < more.step_s[1] * 1.03
    assert any("figures are a range" in text for text in told.cautions)


def test_a_run_that_its_laws_do_not_explain_is_no_advice():
    record = msgspec.structs.replace(few_recorded(), pace=pace_of(LAW.slower(3), (40, 60)))
    assert any("worth little" in text for text in advise(record).cautions)


def test_what_is_not_simulated_is_said():
    record = msgspec.structs.replace(few_recorded(), notes=["eval is"], shared_cores=2)
    told = advise(record)
    cautions = " ".join(told.cautions)
    assert "one more generator" not in told.sentence
    assert "share 2 CPU cores" in cautions
    assert "eval is" in cautions


def test_a_bound_of_0_gets_no_smaller_and_one_generator_no_fewer():
    told = advise(few_recorded(max_staleness_steps=0, engines=1))
    assert [one.change for one in told.changes] == ["one more generator (2 in all)", "a bound of 1"]


def test_an_advice_survives_its_json():
    told = advised(a_scenario())
    assert msgspec.json.decode(msgspec.json.encode(told), type=Advice) == told


def test_lengths_have_the_mean_that_the_run_reports():
    record = recorded(a_scenario())
    drawn = lengths_of(record)
    assert not isinstance(drawn, Fixed)
    tokens = drawn.tokens  # type: ignore[attr-defined]
    assert sum(tokens) / len(tokens) == pytest.approx(record.mean_tokens, rel=0.02)
    without = msgspec.structs.replace(record, lengths={})
    assert lengths_of(without) == Fixed(round(record.mean_tokens))


def test_a_slope_below_0_is_none():
    falling = pace_of(EngineLaw(base_s=0.1), (40, 60))
    falling = msgspec.structs.replace(falling, sequence_seconds=0.99 * falling.sequence_seconds)
    (law,) = fit(msgspec.structs.replace(recorded(a_scenario()), pace=falling)).engines
    assert law.sequence_s == 0.0


def test_time_that_grows_faster_than_sequences_is_all_slope():
    for number in range(200):
        per_token, mean = 0.001 + 0.00137 * number, 3.0 + 0.7 * number
        spread = pace_of(LAW, (mean - 1, mean + 1))
        pace = msgspec.structs.replace(
            spread,
            sequences=spread.tokens * mean,
            squares=spread.tokens * mean**2 * 1.2,
            seconds=spread.tokens * per_token,
            sequence_seconds=spread.tokens * per_token * mean * 3,
        )
        (law,) = fit(msgspec.structs.replace(few_recorded(), pace=pace)).engines
        assert law.base_s == pytest.approx(0.0, abs=1e-12)
        assert law.sequence_s == pytest.approx(per_token / mean)


def test_settings_are_those_that_make_the_change():
    record = msgspec.structs.replace(few_recorded(max_staleness_steps=0), mode="sync", count=0)
    told = advise(record)
    assert [one.setting for one in told.changes] == [
        "slipstream scale, start-generator",
        "slipstream scale, start-generator",
        'run.mode = "async", run.max_staleness_steps = 1',
    ]


def test_a_target_is_simulated_and_no_bound_below_it_is_proposed():
    free = few_recorded(max_staleness_steps=4, learner=SLOW_LEARNER)
    held = msgspec.structs.replace(free, p95_lag=3)
    changes = [one.change for one in advise(held).changes]
    assert "a bound of 3" not in changes
    assert "a bound of 5" in changes
    tight = advise(msgspec.structs.replace(free, p95_lag=1)).now
    assert tight.p95_staleness < advise(free).now.p95_staleness


def test_steps_too_large_to_be_simulated_in_minutes_are_refused():
    record = msgspec.structs.replace(few_recorded(), groups_per_step=100_000, max_in_flight=None)
    with pytest.raises(ConfigError, match=r"run\.groups_per_step x run\.group_size"):
        advise(record)
