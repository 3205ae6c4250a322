"""Each rule advises past its limit; just below it, or with too little data, it gives no advice."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.broker import advisories
from slipstream.broker.advisories.advise import RULES, advise
from slipstream.broker.advisories.view import NUM_WINDOWS, WINDOW_S, Advisory, Column, Trends
from slipstream.wire.messages.status import RoleStatus, RunStatus, SlowStep
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from tests.support.wire_samples import RECORD, STATUS

EVERY_S = 2.0
ROWS = 200  # 400 s
STEPS = 60
GUIDE = Path(__file__).parents[4] / "docs" / "operations.md"


def role(name: str, kind: str) -> RoleStatus:
    return replace(STATUS.roles[0], name=name, role=kind)


def status(**changes: Any) -> RunStatus:  # noqa: ANN401 values of the status
    roles = [role("learner", "learner"), role("g-0", "generator"), role("g-1", "generator")]
    quiet = {
        "steps": STEPS,
        "total_steps": 1_000,
        "max_staleness_steps": 2,
        "group_size": 8,
        "groups_per_step": 4,
        "roles": roles,
        "publish_history": [],
    }
    return replace(STATUS, **quiet | changes)


def history(
    series: Mapping[str, Column] | None = None,
    steps: Mapping[str, Column] | None = None,
    *,
    rows: int = ROWS,
    step_s: float = 5.0,
    num_steps: int = STEPS,
    **limits: Any,  # noqa: ANN401 high_water_bytes, fsync
) -> Trends:
    return Trends(
        at_s=[EVERY_S * row for row in range(rows)],
        series={name: column[:rows] for name, column in (series or {}).items()},
        steps_at_s=[step_s * step for step in range(num_steps)],
        steps={name: column[:num_steps] for name, column in (steps or {}).items()},
        **limits,
    )


def advice(state: RunStatus, trends: Trends) -> dict[str, Advisory]:
    return {advisory.rule: advisory for advisory in advise(state, trends)}


def flat(value: float, rows: int = ROWS) -> list[float]:
    return [value] * rows


def rising(per_row: float) -> list[float]:
    return [per_row * row for row in range(ROWS)]


def busy(learner: float, generators: float = 1.0, **others: Column) -> dict[str, Column]:
    shares = {"busy:learner": learner, "busy:g-0": generators, "busy:g-1": generators}
    return {name: flat(share) for name, share in shares.items()} | others


def publishes(paused_s: float, *, every_s: float = 2.0, count: int = 70) -> list[PublishRecord]:
    phases = {"receive": 9.0, "pause": paused_s / 2, "load": paused_s / 2}
    good = replace(RECORD, failed={}, phase_seconds=phases)
    return [
        replace(good, version=PolicyVersion(1, i), at_s=1e9 + every_s * i) for i in range(count)
    ]


def left_out(*failed: int) -> list[PublishRecord]:
    """Publishes that took no time; each fails as many engines as given."""
    why = {f"g-{i}": "no answer to LoadBucket within 30 s" for i in range(2)}
    return [
        replace(one, failed=dict(list(why.items())[:count]))
        for one, count in zip(publishes(0.0, count=len(failed)), failed, strict=True)
    ]


def quarantined(count: int, of_last: int) -> list[PublishRecord]:
    """Publishes that took no time; at one the engines of some were quarantined."""
    why = {f"g-{i}": "its logprobs of the probe differ by 0.5 nats" for i in range(of_last)}
    made = publishes(0.0, count=count)
    return [*made[:1], replace(made[1], quarantined=why), *made[2:]]


def with_alarm(text: str) -> RunStatus:
    return status(survivorship=replace(STATUS.survivorship, alarm=text))


def by_lag(fresh: float, old: float) -> dict[str, Column]:
    name = "staleness/mismatch_kl"
    return {
        name: flat((fresh + old) / 2, STEPS),
        f"{name}@lag0": flat(fresh, STEPS),
        f"{name}@lag2": flat(old, STEPS),
    }


def falling(before: float, after: float) -> list[float]:
    """A figure that is lower in its last ten steps, with the noise of single batches."""
    noise = [0.01 * (-1) ** step for step in range(STEPS)]
    return [n + (before if step < STEPS - 14 else after) for step, n in enumerate(noise)]


def uploads(failed_before: float, failed: float) -> dict[str, Column]:
    """Uploads of checkpoints, of which some failed in the last steps."""
    counts = [*flat(failed_before, STEPS - 5), *flat(failed, 5)]
    return {"checkpoint/upload_failed": counts, "checkpoint/uploaded_step": flat(40.0, STEPS)}


def drops(zero_variance: float, trained: float) -> dict[str, Column]:
    return {"dropped:zero_variance": rising(zero_variance), "trained": rising(trained)}


def mixed(
    kl: Callable[[int], float | None], staleness: Callable[[int], float]
) -> dict[str, Column]:
    return {
        "staleness/mismatch_kl": [kl(i) for i in range(STEPS)],
        "staleness/mean": [staleness(i) for i in range(STEPS)],
    }


def idle(step: int, adopted: int, leases: int = 0) -> RunStatus:
    """Two generators that run the weights of a step."""
    version = PolicyVersion(1, adopted)
    generators = [
        replace(role(name, "generator"), adopted=version, leases=leases) for name in ("g-0", "g-1")
    ]
    return status(steps=step, roles=[role("learner", "learner"), *generators])


def still(in_flight: float, unscored: Column, *, num_steps: int = 0) -> Trends:
    """A run that has done no step for a while."""
    series = {"in_flight": flat(in_flight), "queue:eval_unscored": unscored}
    return history(series, num_steps=num_steps)


def fruitless(dropped: int, ready: int = 0) -> Trends:
    """A run that has done no step while groups ended."""
    half = ROWS - 5
    series = {
        "dropped:zero_variance": [*flat(100, half), *flat(100 + dropped, 5)],
        "queue:ready_groups": [*flat(2, half), *flat(2 + ready, 5)],
    }
    return history(series, num_steps=0)


Case = tuple[str, RunStatus, Trends, RunStatus, Trends]


def sharing(*shares: float) -> RunStatus:
    """A tenant with these shares of its fair share of lanes, by generator."""
    engines = [
        replace(role(f"g-{number}", "generator"), lane_share=share)
        for number, share in enumerate(shares)
    ]
    return status(roles=[role("learner", "learner"), *engines])


HERE = status()
Columns = Mapping[str, Column]


def of_series(
    rule: str,
    made: Callable[[float], Columns],
    past: float,
    below: float,
    **limits: Any,  # noqa: ANN401
) -> Case:
    """A rule of figures over time, with a number past its limit and one just below."""
    return rule, HERE, history(made(past), **limits), HERE, history(made(below), **limits)


def of_steps(rule: str, made: Callable[[float], Columns], past: float, below: float) -> Case:
    return rule, HERE, history(steps=made(past)), HERE, history(steps=made(below))


def of_publishes(
    rule: str, made: Callable[[Any], list[PublishRecord]], past: float, below: float
) -> Case:
    states = (status(publish_history=made(number)) for number in (past, below))
    return rule, next(states), history(), next(states), history()


REWRITTEN = status(
    roles=[replace(role("g-0", "generator"), rewritten="after 'a' came 'b', and now 'c'")]
)
CASES: list[Case] = [
    (
        "histories-rewritten",
        *(REWRITTEN, history(steps={"turns/branched": flat(0.101)})),
        *(REWRITTEN, history(steps={"turns/branched": flat(0.099)})),
    ),
    (
        "engine-ahead-of-the-learner",
        *(idle(3, 4), still(5, flat(0))),
        *(idle(3, 3), still(5, flat(0))),
    ),
    (
        "work-not-granted",
        *(idle(3, 3), still(0, flat(0))),
        *(idle(3, 3, leases=1), still(0, flat(0))),
    ),
    (
        "evaluation-waits-for-rewards",
        *(idle(3, 3, leases=1), still(0, flat(7))),
        *(idle(3, 3, leases=1), still(0, [*flat(7, ROWS - 1), 6])),
    ),
    (
        "every-group-dropped",
        *(idle(0, 0, leases=1), fruitless(8)),
        *(idle(0, 0, leases=1), fruitless(7)),
    ),
    (
        "step-without-end",
        *(status(slow_step=SlowStep(step=5, seconds=1e3, usual_s=1.0, groups=(7,))), history()),
        *(HERE, history()),
    ),
    ("fsync-too-weak", HERE, history(fsync="everysec"), HERE, history(fsync="always")),
    (
        "survivorship-bias",
        *(with_alarm('40% are dropped; set run.staleness_mode = "wait"'), history()),
        *(HERE, history()),
    ),
    ("tenant-starved", sharing(0.3, 0.66), history(), sharing(0.3, 0.72), history()),
    of_series("learner-starved", busy, 0.74, 0.76),
    of_series("generators-starved", lambda x: busy(1.0, x), 0.74, 0.76),
    of_series(
        "memory-near-the-high-water",
        lambda x: {"store_bytes": flat(x)},
        81,
        79,
        high_water_bytes=100,
    ),
    of_series(
        "kv-thrashing", lambda x: {"answers": rising(10.0), "retracted": rising(x)}, 0.51, 0.49
    ),
    of_series(
        "dead-letters-growing",
        lambda x: {"queue:dead_letters": rising(x / 60), "issued": rising(10.0)},
        *(3.1, 2.8),
    ),
    of_series("zero-variance-flood", lambda x: drops(x, 1.0), 1.01, 0.99),
    of_publishes("publishes-dominating", publishes, 0.41, 0.39),
    of_publishes("engine-left-out", lambda x: left_out(0, x, 0, 1), 1, 0),
    of_publishes("engine-quarantined", lambda x: quarantined(5, x), 2, 0),
    of_steps("uploads-failing", lambda x: uploads(x, 3.0), 0.0, 3.0),
    of_steps("staleness-at-the-bound", lambda x: {"staleness/mean": flat(x, STEPS)}, 1.71, 1.69),
    of_steps("reward-collapse", lambda x: {"reward/sampled": falling(0.6, x)}, 0.38, 0.42),
    of_steps("entropy-collapse", lambda x: {"policy/entropy": falling(0.5, x)}, 0.049, 0.051),
    of_steps("mismatch-kl-without-lag", lambda x: by_lag(x, 0.03), 0.0201, 0.0199),
    of_steps("mismatch-kl-rising-with-lag", lambda x: by_lag(x, 0.03), 0.0149, 0.0151),
]
NAMES = [case[0] for case in CASES]
WITHOUT_WINDOW = {  # events
    *("survivorship-bias", "step-without-end"),
    *("engine-left-out", "engine-quarantined", "tenant-starved"),
}


def test_every_rule_is_tried_here():
    assert sorted(NAMES) == sorted(RULES)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_rule_advises_only_past_its_limit_and_names_a_setting(case: Case):
    rule, state, trends, _, _ = case
    (advisory,) = advice(state, trends).values()
    assert advisory.rule == advisory.why == rule
    assert "." in advisory.setting
    assert advisory.setting in advisory.text
    assert re.search(r"\d|everysec", advisory.text)
    assert advisory.text.endswith(".")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_rule_is_silent_just_below_its_limit(case: Case):
    _, _, _, state, trends = case
    assert advice(state, trends) == {}


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case[0] not in WITHOUT_WINDOW],
    ids=[name for name in NAMES if name not in WITHOUT_WINDOW],
)
def test_a_rule_is_silent_while_there_is_too_little_data(case: Case):
    _, state, trends, _, _ = case
    early = replace(
        trends,
        at_s=trends.at_s[:50],
        series={name: column[:50] for name, column in trends.series.items()},
        steps_at_s=trends.steps_at_s[:9],
        steps={name: column[:9] for name, column in trends.steps.items()},
        high_water_bytes=trends.high_water_bytes,
        fsync="",
    )
    assert advice(replace(state, publish_history=state.publish_history[-9:]), early) == {}


def test_run_that_just_stepped_or_is_over_is_not_stalled():
    for trends in (
        still(0, flat(7), num_steps=60),
        replace(still(0, flat(7)), steps_at_s=[EVERY_S * ROWS - 115.0]),
    ):
        assert advice(idle(60, 61), trends) == {}
    for over in (replace(idle(3, 4), finished=True), replace(idle(3, 4), total_steps=3)):
        assert advice(over, still(0, flat(7))) == {}


def test_a_run_in_which_a_group_got_ready_does_not_drop_every_group():
    assert advice(idle(0, 0, leases=1), fruitless(80, ready=1)) == {}


def test_run_without_history_gets_no_advice():
    assert advise(HERE, Trends(at_s=[], series={}, steps_at_s=[], steps={})) == []


def test_a_column_of_unknown_figures_is_no_figure():
    unknown: Column = [None] * ROWS
    names = ("busy:learner", "busy:g-0", "store_bytes", "queue:dead_letters")
    steps = ("staleness/mean", "reward/sampled", "policy/entropy", "staleness/mismatch_kl@lag1")
    trends = history(
        dict.fromkeys(names, unknown), dict.fromkeys(steps, unknown), high_water_bytes=1
    )
    assert advise(HERE, trends) == []


def test_advice_for_a_starved_pool_depends_on_what_else_waits():
    for learner, generators, waiting, setting in [
        (0.5, 1.0, 0.0, "generators.count"),
        (0.5, 0.5, 0.0, "run.max_staleness_steps"),
        (0.5, 0.5, 16.0, "reward.workers"),
        (1.0, 0.5, 0.0, "learner.ranks"),
        (1.0, 0.5, 16.0, "reward.workers"),
    ]:
        columns = busy(learner, generators, **{"queue:waiting_for_reward": flat(waiting)})
        assert {advisory.setting for advisory in advise(HERE, history(columns))} == {setting}


def test_the_sentence_has_the_number_the_time_and_the_setting():
    text = advice(HERE, history(busy(0.59)))["learner-starved"].text
    assert text == (
        "The learner waited 41% of the last 2 minutes for data, while the generators were 100% "
        "busy: add generators (generators.count) or let each answer more at a time "
        "(generators.max_sequences)."
    )


@pytest.mark.parametrize(
    ("rule", "state", "columns"),
    [
        ("learner-starved", {}, busy(0.5)),
        ("generators-starved", {}, busy(1.0, 0.5)),
        ("publishes-dominating", {"publish_history": publishes(0.6)}, {}),
    ],
)
def test_waiting_of_processes_that_share_few_cores_is_expected_and_no_warning(
    rule: str, state: dict[str, Any], columns: dict[str, Column]
):
    found = {
        cores: advice(status(**state), history(columns, shared_cores=cores))[rule]
        for cores in (0, 2, 4)
    }
    assert [found[cores].level for cores in (0, 2, 4)] == ["warning", "info", "warning"]
    expected = (
        "Expected here: the learner, 2 generators and everything else share 2 CPU cores, so each "
        "waits for the others whatever the settings are."
    )
    assert found[2].text == f"{found[0].text} {expected}"
    assert found[4].text == found[0].text


def test_thrashing_names_the_current_limit_of_answers_per_engine():
    thrown = history({"answers": rising(10.0), "retracted": rising(1.0)})
    generators = [
        replace(role(f"g-{i}", "generator"), sequence_limit=limit)
        for i, limit in enumerate((8, 24))
    ]
    text = advice(status(roles=generators), thrown)["kv-thrashing"].text
    assert text.startswith(
        "Engines threw 10% of the answers of the last 2 minutes out of their cache and computed "
        "them again, with up to 24 under way in an engine now: give the cache more room "
    )
    unknown = [replace(one, sequence_limit=0) for one in generators]
    assert (
        "under way in an engine" not in advice(status(roles=unknown), thrown)["kv-thrashing"].text
    )


def test_long_steps_make_the_window_longer():
    waits = [0.0 if row % 100 else 1.0 for row in range(1_000)]  # busy once in a step of 200 s
    trends = history({"busy:learner": waits}, rows=1_000, step_s=200.0, num_steps=11)
    text = advice(HERE, trends)["learner-starved"].text
    assert "the last 32 minutes" in text  # the first doubling of 2 minutes that holds five steps


def test_what_came_before_the_first_step_and_after_the_last_one_does_not_count():
    shares = [0.0] * 20 + [1.0] * 150 + [0.0] * 30
    trends = replace(
        history({"busy:learner": shares}), steps_at_s=[40.0 + 5 * step for step in range(60)]
    )
    assert "learner-starved" not in advice(status(steps=60, total_steps=60), trends)
    assert "learner-starved" in advice(status(steps=60, total_steps=61), trends)


def test_a_share_that_hovers_about_the_limit_does_not_flap():
    hovering = [0.75 + (0.05 if row % 2 else -0.06) + 0.02 * (row // 100 % 2) for row in range(600)]
    advised = [
        "learner-starved" in advice(HERE, history({"busy:learner": hovering}, rows=rows))
        for rows in range(80, 600)
    ]
    changes = [row for row, (a, b) in enumerate(pairwise(advised)) if a != b]
    assert changes
    assert all(EVERY_S * (b - a) >= WINDOW_S / 2 for a, b in pairwise(changes))


def test_a_mended_pool_is_not_complained_about_any_more():
    shares = [0.5] * 100 + [1.0] * 100
    advised = [
        "learner-starved" in advice(HERE, history({"busy:learner": shares}, rows=rows))
        for rows in (100, ROWS)
    ]
    assert advised == [True, False]


def test_entropy_collapse_is_reported_from_the_thirtieth_step():
    advised = [
        "entropy-collapse" in advice(HERE, history(steps={"policy/entropy": column}))
        for column in ([1.0] * 15 + [0.01] * 14, [1.0] * 15 + [0.01] * 15)
    ]
    assert advised == [False, True]


def test_short_interruption_gives_no_advice():
    shares: Sequence[float] = [1.0] * 150 + [0.0] * 10 + [1.0] * 40
    assert advice(HERE, history({"busy:learner": shares})) == {}


def test_a_kl_that_follows_the_staleness_is_named_where_there_is_none_by_lag():
    def staleness(step: int) -> float:
        return 1.0 + 0.5 * (-1) ** step

    follows = mixed(lambda step: 0.03 + 0.01 * (-1) ** step, staleness)
    text = advice(HERE, history(steps=follows))["mismatch-kl-rising-with-lag"].text
    assert "correlation 1.00 over 40 steps" in text
    assert "The mismatch KL is 0.03 and" in text
    rising_kl = mixed(lambda step: 0.03 + 0.001 * step + 0.01 * (-1) ** step, staleness)
    text = advice(HERE, history(steps=rising_kl))["mismatch-kl-rising-with-lag"].text
    assert "The mismatch KL is 0.069 and" in text, "the newest window ends with the last step"
    numerics = mixed(lambda step: 0.03 + 0.01 * (-1) ** (step // 2), staleness)
    assert advice(HERE, history(steps=numerics)) == {}
    unknown = mixed(
        lambda step: None if step == STEPS - 9 else 0.03 + 0.01 * (-1) ** step, staleness
    )
    assert advice(HERE, history(steps=unknown)) == {}
    harmless = mixed(lambda step: 0.003 + 0.001 * (-1) ** step, staleness)
    assert advice(HERE, history(steps=harmless)) == {}


def test_many_dead_letters_are_an_error_and_errors_come_first():
    columns = {"queue:dead_letters": rising(1.0), "issued": rising(2.0)} | busy(0.5)
    levels = [advisory.level for advisory in advise(HERE, history(columns))]
    assert levels == ["error", "warning"]


def test_staleness_has_no_bound_to_be_at_in_a_synchronous_run():
    trends = history(steps={"staleness/mean": flat(0.0, STEPS)})
    assert advice(status(max_staleness_steps=0), trends) == {}


def test_a_day_of_history_costs_no_more_than_a_few_milliseconds():
    rows = 2_000
    names = [*busy(1.0), "store_bytes", "queue:dead_letters", "trained", "issued"]
    trends = history({name: flat(0.5, rows) for name in names}, rows=rows, num_steps=rows)
    num_read: list[int] = []

    class Counting(list[float]):
        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 as a list does
            if isinstance(index, slice):
                num_read.append(len(range(*index.indices(len(self)))))
            return super().__getitem__(index)

    counted = replace(
        trends, series={name: Counting(column) for name, column in trends.series.items()}
    )
    advise(HERE, counted)
    assert sum(num_read) < 20 * NUM_WINDOWS * rows / 10


def test_engine_that_came_back_is_not_reported():
    assert advice(status(publish_history=left_out(1, 1, 1, 0)), history()) == {}
    (advisory,) = advice(status(publish_history=left_out(0, 2, 2, 1, 2)), history()).values()
    assert advisory.text.startswith("g-0 and 1 more were left out of 4 of the last 5 publishes (no")


def test_every_rule_has_its_section_in_the_guide():
    headings = re.findall(r"^#+ (.+)$", GUIDE.read_text("utf-8"), flags=re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
    assert set(RULES) <= anchors


def test_every_setting_that_is_named_exists():
    settings = (GUIDE.parent / "settings.md").read_text("utf-8")
    folder = Path(advisories.__path__[0])
    source = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    sections = "run|data|reward|learner|algo|generators|broker|weightbus|sampling|checkpoint"
    named = set(re.findall(rf"\b(?:{sections})\.[a-z_]+(?:\.[a-z_]+)?\b", source))
    named = {
        name
        for name in named
        if not name.startswith(
            ("broker.advisories", "broker.dashboard", "broker.history", "data.sources")
        )
    }
    named = {
        "generators.sglang" if name.startswith("generators.sglang.") else name for name in named
    }
    assert named
    assert {name for name in named if f"`{name}`" not in settings} == set()


def test_without_an_engine_thrashing_names_no_answers_under_way():
    thrown = history({"answers": rising(10.0), "retracted": rising(6.0)})
    alone = advice(status(roles=[role("learner", "learner")]), thrown)["kv-thrashing"]
    assert "under way in an engine" not in alone.text
