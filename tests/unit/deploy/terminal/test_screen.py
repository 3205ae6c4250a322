"""What fits on a terminal, what is dropped first, and what a person must see."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from slipstream.broker.advisories.view import Advisory
from slipstream.deploy.terminal.layout import Block, Screen, fit
from slipstream.deploy.terminal.recent import Recent
from slipstream.deploy.terminal.screen import lines_of
from slipstream.wire.messages.status import RoleStatus, RunStatus, ThrottleChange, ThrottleStatus
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState
from tests.support.wire_samples import MEMBERS, RECORD, STATUS

NOW_S = 1_000.0
ADVISORY = Advisory(
    rule="learner-starved",
    level="warning",
    text="The learner waited 41% of the last 2 minutes for data: add generators or let each "
    "answer more at a time (generators.max_sequences).",
    setting="generators.count",
    why="learner-starved",
)


class Known(Recent):
    """A history that was given."""

    def __init__(
        self,
        busy: dict[str, float] | None = None,
        *,
        rewards: Sequence[float] = (),
        advisories: Sequence[Advisory] = (),
    ) -> None:
        super().__init__(None, high_water_bytes=0, fsync="")
        self._busy = busy or {}
        self._curves = {"reward/sampled": list(rewards)}
        self._advisories = list(advisories)

    def busy(self, process: str) -> float | None:
        return self._busy.get(process)

    def curve(self, name: str) -> list[float]:
        return self._curves.get(name, [])


def role(name: str, kind: str, **fields: Any) -> RoleStatus:  # noqa: ANN401 values of the role
    return replace(STATUS.roles[0], name=name, role=kind, **fields)


def status(generators: int = 2, **fields: Any) -> RunStatus:  # noqa: ANN401 values of the status
    roles = [
        role("broker", "broker"),
        *(role(f"generator-{i}", "generator", leases=3) for i in range(generators)),
        role("learner", "learner"),
    ]
    return replace(STATUS, **{"roles": roles, "members": []} | fields)


def drawn(
    state: RunStatus,
    width: int = 80,
    height: int = 24,
    *,
    advisories: Sequence[Advisory] = (),
    recent: Known | None = None,
    plain: bool = False,
    trouble: str = "",
) -> list[str]:
    lines = lines_of(
        state,
        recent or Known(rewards=[0.1, 0.5, 0.9], advisories=advisories),
        Screen(width, height, plain=plain),
        trouble=trouble,
        footer="q quits",
        now_s=NOW_S,
    )
    return [line.plain for line in lines]


def line_with(text: str, lines: Sequence[str]) -> str:
    (found,) = [line for line in lines if text in line]
    return found


def pools(lines: Sequence[str]) -> list[str]:
    """Return the lines of processes, without those of their phases."""
    first = next(i for i, line in enumerate(lines) if line.startswith("pools"))
    names = [i for i, line in enumerate(lines) if i > first and line[:1].strip()]
    return list(lines[first : names[0]])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 10), (20, 3)])
@pytest.mark.parametrize("generators", [0, 2, 64])
def test_nothing_is_wider_or_higher_than_the_screen(width: int, height: int, generators: int):
    lines = drawn(status(generators), width, height, advisories=[ADVISORY] * 5, trouble="x" * 999)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_rich_draws_the_lines_as_they_are():
    state = status()
    known = Known(advisories=[ADVISORY])
    lines = lines_of(state, known, Screen(80, 24), footer="q quits", now_s=NOW_S)
    console = Console(file=(written := io.StringIO()), width=80)
    for line in lines:
        console.print(line)
    text = written.getvalue()
    assert text.splitlines() == [line.plain for line in lines]


def test_a_terminal_of_80_by_24_shows_every_part():
    lines = drawn(status(), advisories=[ADVISORY])
    assert "run  step 5 of 9" in lines[0]
    assert "! The learner waited 41%" in lines[1]
    for title in ("learning", "pools", "staleness", "groups", "queues", "weights"):
        assert line_with(title, [line[:11] for line in lines])
    assert "4 issued = 2 trained + 1 dropped + 1 in flight" in line_with("issued", lines)
    assert lines[-1] == "q quits"


def test_many_generators_take_what_is_left_and_the_rest_is_counted():
    lines = drawn(status(64))
    assert any("more" in line[:10] for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("pools")] == ["learner"]
    assert [line for line in lines if line.startswith("groups")]


def test_silent_process_is_listed_first_and_marked():
    roles = [role("generator-0", "generator"), role("generator-9", "generator", silent_s=3.2)]
    lines = pools(drawn(status(roles=roles)))
    assert "generator-9" in line_with("pools", lines)
    assert "silent for 3 s" in line_with("generator-9", lines)
    assert "%" not in line_with("generator-9", lines), "what it does is not known"


def test_processes_are_in_the_order_of_their_numbers():
    lines = pools(drawn(status(generators=12), height=60))
    numbers = [line.split("generator-")[1].split()[0] for line in lines if "generator-" in line]
    assert numbers == [str(i) for i in range(12)]


def test_correction_figures_are_shown_by_staleness():
    metrics = {"staleness/mismatch_kl@lag0": 0.0008, "staleness/mismatch_kl@lag2": 0.0041}
    step = replace(STATUS.steps_history[-1], metrics=metrics | {"staleness/ess@lag1": 0.9})
    lines = drawn(status(steps_history=[step], max_staleness_steps=2), height=60)
    assert "lag 0 0.00080  lag 2 0.00410" in line_with("mismatch KL", lines)
    assert "lag 1 0.900" in line_with("ESS  ", lines)
    assert not any("clipped" in line for line in lines)


def test_a_staleness_target_says_what_it_holds_back_and_why():
    change = ThrottleChange(step=9, bound=1, in_flight=64, reason="mismatch_kl 0.03 is above")
    held = ThrottleStatus(
        target="mismatch_kl = 0.01",
        bound=1,
        in_flight=64,
        most_in_flight=96,
        excess=2.0,
        changes=(change,),
    )
    text = " ".join(drawn(status(throttle=held, max_staleness_steps=2), 120, 60))
    words = " ".join(text.split())
    assert "target mismatch_kl = 0.01: bound in force 1 of 2, at most 64 of 96 groups" in words
    assert "mismatch_kl 0.03 is above" in words


def test_a_bar_shows_the_last_seconds_and_else_the_whole_life_of_a_process():
    lines = pools(drawn(status(), recent=Known({"generator-0": 0.25})))
    assert " 25% " in line_with("generator-0", lines)
    assert " 90% " in line_with("generator-1", lines)


def test_a_torn_engine_comes_before_those_that_are_current():
    torn = MEMBERS[1]
    members = [*(_current(f"generator-{i}") for i in (2, 3)), torn]
    lines = drawn(status(members=members), 120, 40)
    rows = [line for line in lines if " for " in line and ("torn" in line or "current" in line)]
    assert [row.split()[:2] for row in rows] == [
        ["generator-1", "torn"],
        ["generator-2", "current"],
        ["generator-3", "current"],
    ]
    assert "gone" in rows[0]


def _current(name: str) -> MemberState:
    return MemberState(
        name=name, state="current", version=PolicyVersion(1, 4), since_s=NOW_S, transport="tcp"
    )


def test_newest_publish_is_shown_with_its_phases_if_there_is_room():
    narrow, wide = (
        line_with("1 publishes", drawn(status(publish_history=[RECORD]), width, 40))
        for width in (80, 140)
    )
    assert "left out" in narrow or not RECORD.failed
    assert "receive" not in narrow
    assert "receive 0.125" in wide


def test_what_a_person_must_know_is_shown_first():
    for fields, trouble, first in [
        (
            {"unaccounted": 3, "outcome": "finished"},
            "",
            ["groups UNACCOUNTED FOR: 3", "the run has ended: finished"],
        ),
        (
            {"stop_reason": "of a target", "waiting_for": "a reward"},
            "",
            ["the run ends because of a target", "the learner waits for a reward"],
        ),
        ({}, "the broker has not answered", ["the broker has not answered"]),
    ]:
        lines = drawn(status(**fields), trouble=trouble, advisories=[ADVISORY])
        assert lines[1 : 1 + len(first)] == first
        assert ("3 UNACCOUNTED FOR" in line_with("issued", lines)) == ("unaccounted" in fields)


def test_a_long_wait_is_shown_whole_on_a_narrow_terminal():
    lines = drawn(status(roles=[], issued=0))
    wait = "the learner (it loads its model) and a generator (its engine starts)"
    assert " ".join(lines[1:3]) == f"the run waits for {wait}"


def test_phases_are_beside_a_process_where_they_fit_and_else_below():
    phases = {"wait": 30.0, "generate": 69.0, "adopt": 1.0}
    roles = [role("generator-0", "generator", phase_seconds=phases, leases=3)]
    text = "6 of 8 answers, 25% of the cache; wait 30%, generate 69%, adopt 1% of 100 s"
    narrow, wide = drawn(status(roles=roles), 80, 40), drawn(status(roles=roles), 180, 40)
    assert text in line_with("pools", wide)
    assert not [line for line in wide if line.startswith("phases")]
    assert line_with("pools", narrow).endswith("3 leases"), "nothing is cut at 80 columns"
    start = next(i for i, line in enumerate(narrow) if line.startswith("phases"))
    assert " ".join(line[29:] for line in narrow[start : start + 2]).strip() == text


def test_a_process_that_has_not_reported_is_listed_and_an_observer_is_not():
    roles = [role("relay", "relay", phase_seconds={}), role("me", "observer", phase_seconds={})]
    (row, *others) = pools(drawn(status(roles=roles)))
    assert row.split()[1] == "relay"
    assert "%" not in row
    assert not [line for line in others if "me" in line.split()]


def test_evaluations_are_listed_by_step_and_by_source():
    points = [replace(STATUS.eval[0], step=step) for step in (10, 20)]
    lines = drawn(status(eval=points), height=60)
    assert "10: 0.500, 20: 0.500" in line_with("eval by step", lines)


def test_an_address_that_is_too_long_for_a_line_is_shown_whole():
    url = "http://127.0.0.1:43210/?token=" + "x" * 43
    footer = f"dashboard {url}"
    lines = lines_of(status(), Known(), Screen(80, 24), footer=footer, now_s=NOW_S)
    assert [line.plain for line in lines[-2:]] == ["dashboard", url]


def test_what_others_wrote_is_neither_markup_nor_obeyed_by_the_terminal():
    bad = "[red]\x1b[2Jx"
    state = status(roles=[role(bad, "generator")], run_name=bad, waiting_for=bad)
    text = "\n".join(drawn(state, 120, 40))
    assert "\x1b" not in text
    assert "[red]\\x1b[2Jx" in text


def test_a_terminal_that_knows_ascii_alone_gets_nothing_else():
    assert "\n".join(drawn(status(), plain=True, advisories=[ADVISORY])).isascii()


def test_a_curve_is_drawn_from_its_lowest_to_its_highest_point():
    screen = Screen(80, 24)
    assert screen.spark([0.0, 1.0], 10) == "▁█"
    assert screen.spark([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert screen.spark([5.0, 5.0], 10) == "▁▁"
    assert screen.spark([], 10) == ""


def test_room_goes_to_what_ranks_first_and_order_stays():
    blocks = [
        Block("low", [Text(f"low {i}") for i in range(4)], 1, least=2, good=3),
        Block("high", [Text(f"high {i}") for i in range(3)], 0, least=2, good=2),
        Block("rare", [Text("rare")], 2, least=1, good=1),
    ]

    def shown(height: int) -> list[list[str]]:
        return [line.plain.split() for line in fit(blocks, height)]

    low = [["low", "low", "0"], ["low", "1"], ["low", "2"], ["low", "3"]]
    high = [["high", "high", "0"], ["high", "1"], ["high", "2"]]
    rare = ["rare", "rare"]
    assert shown(1) == [rare]
    assert shown(3) == [high[0], ["+1", "more", "high", "1"], rare]
    assert shown(7) == [*low[:2], ["+1", "more", "low", "2"], *high, rare]
    assert shown(9) == [*low, *high, rare]
    assert shown(10) == [*low, [], *high, [], rare]


def test_block_of_one_line_shows_how_many_lines_are_hidden():
    (line,) = fit([Block("name", [Text("a"), Text("b"), Text("c")], 0, least=1, good=1)], 1)
    assert line.plain.split() == ["name+2", "a"]


def test_many_lags_take_one_line_where_there_is_no_room_for_bars():
    histogram = {str(lag): 10 for lag in range(10)}
    state = status(max_staleness_steps=9, staleness_histogram=histogram)
    low, high = drawn(state), drawn(state, 120, 50)
    assert "0: 10%  1: 10%" in line_with("staleness", low)
    assert len([line for line in high if "of trained tokens" in line]) == 10
