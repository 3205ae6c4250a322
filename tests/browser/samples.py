"""A run that looks like a real one, for the page's tests; made of the structs in wire/status.py."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from broker.dashboard.advisories import Advisory
from broker.dashboard.history import HistoryColumns, StepColumns, TimeColumns
from broker.dashboard.items import Item, Letter, Sibling, Token, Trajectory
from broker.trace import Moment
from tests.wire_samples import STATUS
from wire.bus import MemberState, PublishRecord
from wire.status import (
    EvalFigures,
    EvalPoint,
    LengthQuartile,
    RoleStatus,
    RunStatus,
    StepPoint,
    Survivorship,
)
from wire.versions import PolicyVersion

STARTED_S = 1_760_000_000.0  # unix time
HOSTILE = '<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">'
GENERATORS = ("generator-0", "generator-1", "generator-2", "generator-3")
PROCESSES = ("learner", *GENERATORS, "reward-0", "relay", "broker")
BUSY = {"learner": 0.71, "reward-0": 0.35, "relay": 0.08, "broker": 0.12}
BOUND = 2
LOST = 4_000  # group of the first dead letter; its answers are not recorded


@dataclass(slots=True)
class Run:
    """What a run has done after ``steps`` learner steps; draws are repeatable."""

    steps: int = 240
    rows: int = 600  # of time
    every_s: float = 2.0
    live: bool = True
    now_s: float = field(default_factory=time.time)
    silent_s: dict[str, float] = field(default_factory=dict)  # by process

    @property
    def elapsed_s(self) -> float:
        return self.rows * self.every_s

    def status(self) -> RunStatus:
        """Return the status; its counts fulfil the conservation equation."""
        dropped = {"zero_variance": 723, "stale": 118, "overlong_response": 9}
        in_flight = {"issued": 14, "leased": 40, "generated": 6, "ready": 21, "delivered": 32}
        trained = 32 * self.steps
        issued = trained + sum(dropped.values()) + sum(in_flight.values())
        return msgspec.structs.replace(
            STATUS,
            run_name="gsm-0.5b",
            outcome="running" if self.live else "finished",
            finished=not self.live,
            stop_reason="",
            elapsed_s=self.elapsed_s,
            steps=self.steps,
            total_steps=500,
            max_staleness_steps=BOUND,
            group_size=8,
            groups_per_step=32,
            issued=issued,
            trained=trained,
            sealed=32 * (self.steps // 20 * 20),
            requeued=3,
            dropped=dropped,
            in_flight=in_flight,
            unaccounted=0,
            trajectories={
                "issued": issued * 8,
                "trained": trained * 8,
                "dropped": sum(dropped.values()) * 8,
                "in_flight": sum(in_flight.values()) * 8,
            },
            staleness_histogram={"0": 1_974_900, "1": 7_155_800, "2": 1_540_700},
            survivorship=_survivorship(),
            queue={
                "ready_groups": 21,
                "leased_groups": 40,
                "waiting_for_reward": 17,
                "being_scored": 8,
                "eval_rounds": 0,
                "lapsed_leases": 2,
                "dead_letters": 4,
                "rejected_messages": 0,
            },
            waiting_for="",
            eval=[_evaluation(step) for step in range(0, self.steps + 1, 30)],
            steps_history=[],
            publishes=self.steps,
            publishes_while_generating=self.steps - 1,
            publish_history=[_publish(step) for step in range(max(1, self.steps - 31), self.steps)],
            members=self._members(),
            tokens_per_second={"generator": 8913.4, "learner": 8410.6},
            busy={"learner": 0.71, "generator": 0.96, "reward": 0.35, "broker": 0.12},
            roles=[self._role(name) for name in PROCESSES],
            data={"rows": 7473, "rows_skipped": 0, "eval_problems": 256},
            versions={"torch": "2.11"},
        )

    def _members(self) -> list[MemberState]:
        version = PolicyVersion(1, self.steps)
        states = [
            MemberState(
                name=name,
                state="current",
                version=version,
                since_s=self.now_s - 7.0,
                transport="collective",
            )
            for name in GENERATORS[:3]
        ]
        torn = MemberState(
            name=GENERATORS[3],
            state="torn",
            version=None,
            since_s=self.now_s - 7.0,
            transport="tcp",
            reason="no answer to LoadBucket within 30 s (weightbus.timeout_s)",
        )
        return [*states, torn]

    def _role(self, name: str) -> RoleStatus:
        role = name.split("-")[0]
        phases = {
            "learner": {"train": 590.0, "proximal": 210.0, "wait": 348.0, "publish": 52.0},
            "generator": {"generate": 1140.0, "adopt": 12.0, "wait": 48.0},
        }.get(role, {"serve": 120.0, "wait": 1080.0})
        is_generator = role == "generator"
        return RoleStatus(
            name=name,
            role=role,
            age_s=self.elapsed_s,
            silent_s=self.silent_s.get(name, 0.4),
            busy=BUSY.get(name, 0.96),
            phase_seconds=phases,
            tokens_per_second=2228.0 if is_generator else 8410.6 if role == "learner" else 0.0,
            adopted=PolicyVersion(1, self.steps) if is_generator else None,
            leases=10 if is_generator else 0,
        )

    def point(self, row: int) -> dict[str, float | None]:
        """Return the time sample at ``row``."""
        draw = random.Random(row)
        wave = 0.5 + 0.5 * math.sin(row / 17)
        step = int(row * self.steps / self.rows)
        series: dict[str, float | None] = {
            f"busy:{name}": _share(
                BUSY.get(name, 0.96) + draw.gauss(0, 0.07) - 0.2 * wave * (name == "learner")
            )
            for name in PROCESSES
        }
        if 300 <= row < 340:
            series[f"busy:{GENERATORS[3]}"] = None
        ready = 21 + 10 * wave
        series |= {
            "tokens:generator": 8900 + 500 * wave + draw.gauss(0, 260),
            "tokens:learner": 8400 + 300 * wave + draw.gauss(0, 420),
            "queue:ready_groups": round(ready),
            "queue:leased_groups": 40,
            "queue:waiting_for_reward": round(10 + 12 * draw.random()),
            "queue:being_scored": 8,
            "queue:dead_letters": row // 150,
            "queue_age_s": 4 + 8 * wave + draw.random(),
            "dropped:stale": row // 5,
            "in_flight": 113,
            "issued": step * 36,
            "trained": step * 32,
            "store_bytes": 4.1e8,
            "rss_bytes": 2.2e8,
        }
        slow = {GENERATORS[2]: row % 97 > 88, GENERATORS[3]: row % 211 > 170}
        series |= {f"version:{name}": step - slow.get(name, False) for name in GENERATORS}
        series |= {
            f"staleness_in_flight:{lag}": round(n)
            for lag, n in enumerate((34, 22 + 9 * wave, 5 * wave))
        }
        series |= {
            f"staleness_queue:{lag}": round(ready * s) for lag, s in enumerate((0.2, 0.6, 0.2))
        }
        return {"at_s": row * self.every_s, **series}

    def step(self, step: int) -> StepPoint:
        """Return what is known of one learner step."""
        draw = random.Random(-step)
        done = 1 - math.exp(-step / 90)
        by_lag = {
            f"{name}@lag{lag}": value
            for lag in range(BOUND + 1)
            for name, value in (
                ("staleness/mismatch_kl", (0.0008 + 0.0016 * lag) * (1 + 0.2 * draw.random())),
                ("staleness/ess", 0.995 - 0.03 * lag - 0.01 * draw.random()),
                ("policy/clip_fraction", 0.002 + 0.007 * lag + 0.002 * draw.random()),
            )
        }
        metrics = {
            "policy/loss": draw.gauss(0, 0.02),
            "policy/entropy": 0.9 - 0.55 * done + draw.gauss(0, 0.012),
            "policy/clip_fraction": 0.009,
            "policy/grad_norm": 0.4,
            "reward/mean": 0.5 + 0.12 * done + draw.gauss(0, 0.03),
            "reward/sampled": 0.27 + 0.6 * done + draw.gauss(0, 0.03),
            "response/tokens": 210 - 60 * done + draw.gauss(0, 6),
            "response/truncated": 0.04 - 0.03 * done,
            "staleness/mean": 0.96,
            "staleness/mismatch_kl": 0.0021,
            "staleness/ess": 0.972,
            "time/step": 4.9,
            **by_lag,
        }
        return StepPoint(step=step, at_s=step * 5.0, metrics=metrics)

    def letters(self) -> list[Letter]:
        """Return dead letters; one prompt is hostile, of one no attempt is kept."""
        unscored = Letter(
            group_id=LOST,
            reason="reward_unavailable",
            step=self.steps,
            prompt=HOSTILE,
            failures=["sibling 3, timeout, reward-0"],
        )
        lapsed = Letter(
            group_id=LOST + 1,
            reason="lease_exhausted",
            step=self.steps - 1,
            prompt="What is 6 times 7?",
            failures=[],
        )
        return [unscored, lapsed]

    def history(self) -> HistoryColumns:
        """Return the columns of time and steps."""
        points = [self.point(row) for row in range(self.rows)]
        steps = [self.step(step) for step in range(1, self.steps + 1)]
        return HistoryColumns(
            began_s=STARTED_S,
            time=TimeColumns(
                every_s=self.every_s,
                at_s=[point.pop("at_s") or 0.0 for point in points],
                series=_columns(points),
            ),
            steps=StepColumns(
                step=[float(point.step) for point in steps],
                at_s=[point.at_s for point in steps],
                series=_columns([point.metrics for point in steps]),
            ),
        )

    def row(self, step: int) -> dict[str, float | None]:
        """Return a learner step as the page's stream tells it."""
        point = self.step(step)
        return {"step": step, "at_s": point.at_s, **point.metrics}


ADVISORIES = [
    Advisory(
        rule="publish-left-out",
        level="error",
        text="generator-3 holds a mixture of two versions since 0:40 and generates nothing.",
        setting="weightbus.timeout_s",
        why="engine-left-out",
    ),
    Advisory(
        rule="learner-starved",
        level="warning",
        text="The learner waited 29% of the last 10 minutes for groups: add generators, "
        "or let them run further ahead.",
        setting="run.max_staleness_steps",
        why="learner-starved",
    ),
]


def items(text: str) -> list[Item]:
    """Return the recorded trajectories that a search finds; one prompt is hostile."""
    prompts = [HOSTILE, "Natalia sold clips to 48 of her friends in April.", "37+85="]
    rows = [
        Item(
            step=240 - i // 4,
            group_id=17 + i // 4,
            sibling=i % 4,
            lag=i % (BOUND + 1),
            reward=float(i % 2),
            prompt=prompts[(i // 4) % 3],
            num_tokens=44 + i,
        )
        for i in range(24)
    ]
    if text.startswith("g") and text[1:].isdigit():
        return [row for row in rows if row.group_id == int(text[1:])]
    return [row for row in rows if text in row.prompt]


def trajectory(group: int, sibling: int) -> Trajectory:
    """Return a trajectory of two versions; a token of its answer is hostile."""
    if group >= LOST:
        attempts = [Moment(STARTED_S + 900 + i, f"attempt {i + 1} failed") for i in range(3)]
        return Trajectory(found=False, group_id=group, sibling=sibling, life=attempts)
    draw = random.Random(group * 8 + sibling)
    answer = "In May she sold half as many , so 48 / 2 = 24 . Together that is 48 + 24 = 72 clips ."
    texts = [f"{word} " for word in answer.split()] + [HOSTILE, "<eos>"]
    change = len(texts) // 3
    tokens = [
        Token(
            text=text,
            version="v1.238" if i < change else "v1.239",
            lag=2 if i < change else 1,
            diff=round(draw.gauss(0, 0.02) if i % 7 else draw.gauss(-0.3, 0.3), 6),
        )
        for i, text in enumerate(texts)
    ]
    life = [
        (0.0, "issued to generator-0 (v1.238)"),
        (1.2, "v1.239 adopted in the middle of the answer"),
        (3.4, f"{len(texts)} tokens received, scored by reward-0"),
        (7.9, "delivered to the learner, step 240"),
        (12.1, "trained by step 240"),
    ]
    return Trajectory(
        found=True,
        step=240,
        group_id=group,
        sibling=sibling,
        prompt=HOSTILE if group == 17 else "Natalia sold clips to 48 of her friends in April.",
        reward=1.0,
        parts={"correct": 1.0, "format": 0.5},
        finish_reason="stop",
        tokens=tokens,
        life=[Moment(STARTED_S + 1100 + at, what) for at, what in life],
        siblings=[Sibling(i, float(i % 2)) for i in range(8)],
    )


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _survivorship() -> Survivorship:
    lengths = ((96, 18), (160, 25), (224, 61), (512, 203))
    return Survivorship(
        generated_mean=171.3,
        trained_mean=166.9,
        cancelled=41,
        quartiles=[
            LengthQuartile(up_to_tokens=tokens, trajectories=17_100, dropped_for_age=dropped)
            for tokens, dropped in lengths
        ],
        alarm="",
    )


def _evaluation(step: int) -> EvalPoint:
    mean = round(0.28 + 0.55 * (1 - math.exp(-step / 80)), 4)
    half = {
        name: EvalFigures(
            num_problems=128,
            num_answers=512,
            num_dropped=0,
            metrics={"mean@4": mean + shift, "pass@4": min(1.0, mean + shift + 0.1)},
        )
        for name, shift in (("gsm8k", 0.02), ("addition", -0.02))
    }
    overall = EvalFigures(
        num_problems=256,
        num_answers=1024,
        num_dropped=0,
        metrics={
            "mean@4": mean,
            "pass@4": min(1.0, mean + 0.1),
            "response_tokens": 171.0,
            "truncated": 0.01,
        },
    )
    return EvalPoint(step=step, overall=overall, by_source=half, versions=(PolicyVersion(1, step),))


def _publish(step: int) -> PublishRecord:
    draw = random.Random(step)
    failed = {GENERATORS[3]: "no answer to LoadBucket within 30 s"} if step % 12 == 0 else {}
    return PublishRecord(
        version=PolicyVersion(1, step),
        at_s=STARTED_S + step * 5.0,
        adopted_by={name: 0.4 + draw.random() * 0.2 for name in GENERATORS if name not in failed},
        failed=failed,
        num_in_flight=dict.fromkeys(GENERATORS, 10),
        phase_seconds={
            "digest": 0.03,
            "offer": 0.01,
            "group": 0.02,
            "pause": 0.02 + 0.02 * draw.random(),
            "transfer": 0.25 + 0.1 * draw.random(),
            "verify": 0.06,
            "commit": 0.02,
        },
        num_bytes=988_097_824,
        transports=dict.fromkeys(GENERATORS, "collective"),
    )
