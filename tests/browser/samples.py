"""A run that resembles a real one, for the page's tests; made of the structs of the status."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import msgspec

from slipstream.broker.advisories.advise import advise
from slipstream.broker.advisories.view import Advisory
from slipstream.broker.dashboard.turn_spans import drawn
from slipstream.broker.history.columns import HistoryColumns, StepColumns, TimeColumns, trends_of
from slipstream.broker.history.trajectories import (
    Item,
    Letter,
    Sibling,
    Stretch,
    Token,
    TrainedRow,
    Trajectory,
    TurnTokens,
    VersionTokens,
)
from slipstream.broker.store.item_history import Moment
from slipstream.wire.messages.status import (
    EvalFigures,
    EvalPoint,
    LengthQuartile,
    RoleStatus,
    RunStatus,
    StepPoint,
    Survivorship,
    ThrottleChange,
    ThrottleStatus,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord
from tests.support.wire_samples import STATUS

STARTED_S = 1_760_000_000.0  # unix time
HOSTILE = '<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">'
BUSY = {"learner": 0.71, "reward-0": 0.35, "relay": 0.08, "broker": 0.12}
GENERATING = 0.96  # busy share of a generator
BOUND = 2
SHARES = (0.18, 0.67, 0.15)  # of a step's tokens, by lag
GROUPS = range(8_417, 8_423)  # that were recorded
RECORDED = 4  # answers of each
LOST = 8_300  # group of the first dead letter; its answers are not recorded
TORN_S = 40.0  # for how long the last generator has held no whole version
PROBLEMS = (  # prompts and answers
    (
        "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in all?",
        "The white fiber is half of 2 bolts , which is 1 bolt . So it takes 2 + 1 = 3 bolts .",
    ),
    (
        "Natalia sold clips to 48 of her friends in April, and half as many in May. "
        "How many clips did she sell in all?",
        "In May she sold half as many , so 48 / 2 = 24 . Together that is 48 + 24 = 72 clips .",
    ),
    ("37+85=", "37 + 85 : 30 + 80 = 110 and 7 + 5 = 12 , so it is 110 + 12 = 122 ."),
)


OBSERVATION = "\n".join(f"row {number:03d}: {number * 37 % 101} of 101" for number in range(40))
TURNS = (  # of an agent: what came before each, and its reply
    (
        "",
        'I begin in the middle . <tool_call> {"name": "compare", "arguments": '
        '{"guess": 50}} </tool_call> <eos>',
    ),
    (
        "<|tool|> The number is larger. <eos> <|assistant|>",
        'Then the table helps . <tool_call> {"name": "read_table", "arguments": {}} '
        "</tool_call> <eos>",
    ),
    (
        f"<|tool|> {OBSERVATION} <eos> <|assistant|>",
        "Row 021 has the first one above 50 : it is 70 . <eos>",
    ),
    (
        "<|user|> Before: 50 is too small, and the table has 70. <eos> <|assistant|>",
        "The number is 70 . <eos>",
    ),
)
TURN_REWARDS = (0.1, 0.1, -0.05, 1.0)
REWRITTEN = 3  # index of the turn before which the history is rewritten


@dataclass(frozen=True, slots=True)
class Record:
    """One answer that was recorded: what the list and the article show of it."""

    group_id: int
    sibling: int
    step: int  # that trained it
    oldest: int  # step of the version of its first token
    prompt: str
    tokens: list[Token]
    reward: float
    stretches: tuple[Stretch, ...] = ()  # of several turns

    @property
    def item(self) -> Item:
        """Return it as lists have it."""
        return Item(
            step=self.step,
            group_id=self.group_id,
            sibling=self.sibling,
            lag=self.step - self.oldest,
            reward=self.reward,
            prompt=self.prompt,
            num_tokens=len(self.tokens),
            num_turns=self.num_turns,
            num_branches=self.num_branches,
        )

    @property
    def num_turns(self) -> int:
        return max([1, *(one.turn for one in self.stretches)])

    @property
    def num_branches(self) -> int:
        return max([1, *(one.branch for one in self.stretches)])

    @property
    def life(self) -> list[Moment]:
        """Return its life in the words of broker/store/item_history.py."""
        counts: dict[str, int] = {}
        for token in self.tokens:
            counts[token.version] = counts.get(token.version, 0) + 1
        versions = ", ".join(f"{count} tokens by {version}" for version, count in counts.items())
        events = (
            (0.0, "issued for training"),
            (0.02, f"leased to generator-0, which runs step {self.oldest}"),
            (3.4, f"sibling {self.sibling}: {versions} (stop)"),
            (3.6, f"sibling {self.sibling}: reward {self.reward:g} by math"),
            (7.9, f"in the batch of step {self.step}"),
            (12.1, f"trained by the step that made v1.{self.step + 1}"),
        )
        began_s = STARTED_S + self.step * 5.0 - 9.0
        return [Moment(began_s + at_s, what) for at_s, what in events]


@dataclass(slots=True)
class Run:
    """What a run has done after ``steps`` learner steps; draws are repeatable."""

    steps: int = 240
    rows: int = 600  # of time
    every_s: float = 2.0
    live: bool = True
    hostile: bool = False  # prompts, answers and failures that are markup
    num_generators: int = 4
    evaluated: bool = True
    reference: bool = False  # whether there is a reference policy
    critic: bool = False
    one_minibatch: bool = False  # of a step, whose ratios are then 1
    agents: bool = False  # trajectories of several turns
    held: bool = False  # by a staleness target
    observed: int = 0  # characters that one of their observations has besides
    outcome: str = ""  # empty: follows from ``live``
    run_name: str = "sample-data"
    waiting_for: str = ""
    tokens_by_lag: Mapping[str, int] = field(
        default_factory=lambda: {"0": 1_974_900, "1": 7_155_800, "2": 1_540_700}
    )
    dropped: Mapping[str, int] = field(default_factory=dict)  # besides the usual ones
    unheard: frozenset[str] = frozenset()  # processes without a busy share in new samples
    now_s: float = field(default_factory=time.time)
    silent_s: dict[str, float] = field(default_factory=dict)  # by process
    images: tuple[str, ...] = ()  # digests of every trajectory's images

    @property
    def elapsed_s(self) -> float:
        return self.rows * self.every_s

    @property
    def generators(self) -> tuple[str, ...]:
        """Return their names; the last one holds a mixture of two versions."""
        return tuple(f"generator-{i}" for i in range(self.num_generators))

    @property
    def processes(self) -> tuple[str, ...]:
        return ("learner", *self.generators, "reward-0", "relay", "broker")

    @property
    def torn_row(self) -> int:
        """Return the sample from which on the last generator holds no whole version."""
        return self.rows - round(TORN_S / self.every_s)

    def status(self) -> RunStatus:
        """Return the status; its counts fulfil the conservation equation."""
        if not self.rows:
            return self._nothing()
        dropped = {"zero_variance": 723, "stale": 118, "overlong_response": 9, **self.dropped}
        in_flight = {"issued": 14, "leased": 40, "generated": 6, "ready": 21, "delivered": 32}
        trained = 32 * self.steps
        issued = trained + sum(dropped.values()) + sum(in_flight.values())
        return msgspec.structs.replace(
            STATUS,
            run_name=self.run_name,
            outcome=self.outcome or ("running" if self.live else "finished"),
            finished=not self.live,
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
            trajectories={
                "issued": issued * 8,
                "trained": trained * 8,
                "dropped": sum(dropped.values()) * 8,
                "in_flight": sum(in_flight.values()) * 8,
            },
            staleness_histogram=dict(self.tokens_by_lag),
            survivorship=_survivorship(),
            throttle=_throttle() if self.held else None,
            queue={
                "ready_groups": 21,
                "leased_groups": 40,
                "waiting_for_reward": 17,
                "being_scored": 8,
                "eval_rounds": 0,
                "lapsed_leases": 2,
                "restarted_trajectories": 5,
                "dead_letters": 4,
                "rejected_messages": 0,
            },
            waiting_for=self.waiting_for,
            eval=[_evaluation(step) for step in range(0, self.steps + 1, 30) if self.evaluated],
            steps_history=[],
            publishes=self.steps,
            publishes_while_generating=self.steps - 1,
            publish_history=[
                _publish(step, self.generators, is_torn=step > self.steps - TORN_S / 5)
                for step in range(max(1, self.steps - 31), self.steps + 1)
            ],
            members=self._members(),
            tokens_per_second={"generator": 8913.4, "learner": 8410.6},
            busy={"learner": 0.71, "generator": 0.95, "reward": 0.35, "broker": 0.12},
            roles=[self._role(name) for name in self.processes],
            data={"rows": 7473, "rows_skipped": 0, "eval_problems": 256},
        )

    def _nothing(self) -> RunStatus:
        """Return the status of a run whose broker has just come up."""
        counts = ("steps", "issued", "trained", "sealed", "requeued", "unaccounted", "publishes")
        tables = ("dropped", "in_flight", "staleness_histogram", "busy", "tokens_per_second")
        lists = ("eval", "steps_history", "publish_history", "members", "roles")
        return msgspec.structs.replace(
            STATUS,
            run_name="sample-data",
            elapsed_s=0.5,
            total_steps=500,
            trajectories=dict.fromkeys(("issued", "trained", "dropped", "in_flight"), 0),
            survivorship=Survivorship(
                generated_mean=0.0, trained_mean=0.0, cancelled=0, quartiles=[], alarm=""
            ),
            queue=dict.fromkeys(("ready_groups", "leased_groups", "dead_letters"), 0),
            waiting_for=self.waiting_for,
            publishes_while_generating=0,
            versions={},
            **dict.fromkeys(counts, 0),
            **{name: {} for name in tables},
            **{name: [] for name in lists},
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
            for name in self.generators[:-1]
        ]
        torn = MemberState(
            name=self.generators[-1],
            state="torn",
            version=None,
            since_s=self.now_s - TORN_S,
            transport="tcp",
            reason="no answer to LoadBucket within 30 s (weightbus.timeout_s)",
        )
        return [*states, torn]

    def _role(self, name: str) -> RoleStatus:
        role = name.split("-")[0]
        phases = {
            "learner": {"train": 590.0, "proximal": 210.0, "wait": 348.0, "publish": 52.0},
            "generator": {"generate": 1140.0, "adopt": 12.0, "wait": 48.0}
            | ({"act": 31.0} if self.agents else {}),
        }.get(role, {"serve": 120.0, "wait": 1080.0})
        is_generator, is_torn = role == "generator", name == self.generators[-1]
        torn = TORN_S / self.elapsed_s if is_torn else 0.0
        engine: dict[str, Any] = {}
        if is_generator:
            engine = {"leases": 0 if is_torn else 10, "kv_use": 0.62, "sequences": 40}
            engine |= {"sequence_limit": 48}
        if is_generator and self.agents:
            engine |= {"acting": 11, "environment_failed": 2.0}
            engine |= {"engine_s": 6_900.0, "environment_s": 2_300.0}
        return RoleStatus(
            name=name,
            role=role,
            age_s=self.elapsed_s,
            silent_s=self.silent_s.get(name, 0.4),
            busy=BUSY.get(name, GENERATING) * (1 - torn),
            phase_seconds=phases,
            tokens_per_second=8913.4 / self.num_generators
            if is_generator
            else 8410.6
            if role == "learner"
            else 0.0,
            adopted=PolicyVersion(1, self.steps) if is_generator and not is_torn else None,
            **engine,
            cpu_cores={"learner": 1.1, "generator": 1.4, "reward": 3.7}.get(role, 0.2),
            memory_bytes=round({"learner": 9.4, "generator": 6.2}.get(role, 0.4) * 2**30),
        )

    def point(self, row: int) -> dict[str, float | None]:
        """Return the time sample at ``row``."""
        draw = random.Random(row)
        wave = 0.5 + 0.5 * math.sin(row / 17)
        step = int(row * self.steps / self.rows)
        series: dict[str, float | None] = {
            f"busy:{name}": _share(
                BUSY.get(name, GENERATING) + draw.gauss(0, 0.07) - 0.2 * wave * (name == "learner")
            )
            for name in self.processes
        }
        last = self.generators[-1]
        if 300 <= row < 340:
            series[f"busy:{last}"] = None
        if row >= self.torn_row:
            series[f"busy:{last}"] = 0.0
        series |= {f"busy:{name}": None for name in self.unheard}
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
            "dropped:stale": 118 * row // self.rows,
            "dropped:zero_variance": 723 * row // self.rows,
            "in_flight": 113,
            "issued": step * 36,
            "trained": step * 32,
            "store_bytes": 4.1e8,
            "rss_bytes": 2.2e8,
        }
        slow = {self.generators[-2]: row % 97 > 88, last: row % 211 > 170}
        series |= {f"version:{name}": step - slow.get(name, False) for name in self.generators}
        if row >= self.torn_row:
            series[f"version:{last}"] = None
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
        metrics = {
            **_of_tokens(step, done),
            "policy/loss": draw.gauss(0, 0.02),
            "policy/grad_norm": 0.4,
            "reward/mean": 0.5 + 0.12 * done + draw.gauss(0, 0.03),
            "reward/sampled": 0.27 + 0.6 * done + draw.gauss(0, 0.03),
            "response/tokens": 210 - 60 * done + draw.gauss(0, 6),
            "response/truncated": 0.04 - 0.03 * done,
            "staleness/mean": 0.96,
            "time/step": 4.9,
        }
        if self.one_minibatch:
            flat = ("policy/clip_up", "policy/clip_down", "policy/clip_dual", "staleness/masked")
            metrics |= dict.fromkeys(flat, 0.0)
            metrics |= dict.fromkeys(("policy/ratio", "policy/ratio_max"), 1.0)
        if self.agents:
            metrics |= {
                "turns/mean": 3.1 - done + draw.gauss(0, 0.1),
                "turns/max": float(draw.randint(5, 8)),
                "turns/branched": _share(0.2 + 0.1 * done + draw.gauss(0, 0.03)),
            }
        if self.reference:
            metrics["policy/kl_reference"] = 0.03 * done + 0.002 * draw.random()
            metrics["policy/kl_behavior"] = 0.004 + 0.001 * draw.random()
            metrics["policy/kl_teacher"] = 0.12 - 0.08 * done + 0.002 * draw.random()
        if self.critic:
            metrics |= {
                "critic/loss": 0.02 + 0.2 / (1 + step / 20) + 0.01 * draw.random(),
                "critic/explained_variance": 0.82 * done + draw.gauss(0, 0.03),
                "critic/value": 0.45 + 0.14 * done + draw.gauss(0, 0.01),
                "critic/return": 0.5 + 0.12 * done + draw.gauss(0, 0.03),
            }
        return StepPoint(step=step, at_s=step * 5.0, metrics=metrics)

    def letters(self) -> list[Letter]:
        """Return dead letters; one prompt is hostile, of one no attempt is kept."""
        unscored = Letter(
            group_id=LOST,
            reason="reward_unavailable",
            step=self.steps,
            prompt=HOSTILE if self.hostile else PROBLEMS[0][0],
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

    def records(self) -> list[Record]:
        """Return the recorded answers, the newest group first."""
        found: list[Record] = []
        for place, group in enumerate(GROUPS if self.rows else ()):
            step = max(BOUND, self.steps - 1 - place)
            found += [self._record(group, sibling, step) for sibling in range(RECORDED)]
        return found

    def _record(self, group: int, sibling: int, step: int) -> Record:
        draw = random.Random(group * 8 + sibling)
        prompt, answer = PROBLEMS[group % len(PROBLEMS)]
        if self.hostile and group == GROUPS[0]:
            prompt = HOSTILE
        lag = sibling % (BOUND + 1)
        if self.agents:
            return self._of_turns(group, sibling, step, lag)
        begun = ("So : ", "First , ", "", "Let me see . ")[sibling]
        texts = [f"{word} " for word in (begun + answer).split()]
        texts += [HOSTILE, "<eos>"] if self.hostile else ["<eos>"]
        change = len(texts) // 3  # begun at an old version, continued with a newer one
        lags = [lag if i < change else max(0, lag - 1) for i in range(len(texts))]
        tokens = [
            Token(
                text=text,
                version=f"v1.{step - lags[i]}",
                lag=lags[i],
                diff=round(draw.gauss(0, 0.02) if i % 7 else draw.gauss(-0.3, 0.3), 6),
            )
            for i, text in enumerate(texts)
        ]
        return Record(group, sibling, step, step - lag, prompt, tokens, float(sibling % 2))

    def _of_turns(self, group: int, sibling: int, step: int, lag: int) -> Record:
        """Return an agent's trajectory, as the page makes it of a row."""
        draw = random.Random(group * 8 + sibling)
        asked = "<|user|> Which number from 1 to 100 is it? <eos> <|assistant|>"
        words: list[str] = []
        turns, branches = [], []
        for number, (context, reply) in enumerate(TURNS):
            if number == REWRITTEN:
                branches.append(len(words))
            if number in {0, REWRITTEN}:
                words += [f"{word} " for word in asked.split(" ")]
            if self.hostile and context:
                words.append(HOSTILE)
            words += [f"{word} " for word in context.split(" ") if word]
            if self.observed and number == REWRITTEN - 1:
                words.append("x" * self.observed)
            said = [f"{word} " for word in reply.split(" ")] + ([HOSTILE] if self.hostile else [])
            turns.append(TurnTokens(len(words), len(said)))
            words += said
        first, change = turns[0].first_token, turns[1].first_token + 5
        known = {word: number for number, word in enumerate(dict.fromkeys(words))}
        row = TrainedRow(
            step=step,
            group_id=group,
            sibling=sibling,
            prompt=asked,
            answer="",
            reward=sum(TURN_REWARDS),
            num_prompt_tokens=first,
            token_ids=[known[word] for word in words],
            version_runs=[
                VersionTokens(first, f"v1.{step - lag}", step - lag),
                VersionTokens(change, f"v1.{step - max(0, lag - 1)}", step - max(0, lag - 1)),
            ],
            logprob_diffs=[round(draw.gauss(0, 0.02), 6) for _ in words[first:]],
            token_texts=words[first:],
            turns=turns,
            turn_rewards=list(TURN_REWARDS),
            branches=branches,
        )
        stretches, tokens = drawn(row)
        return Record(group, sibling, step, step - lag, asked, tokens, row.reward, tuple(stretches))

    def items(self, text: str = "", lag: int | None = None) -> list[Item]:
        """Return what a search finds."""
        records = self.records()
        if lag is not None:
            return [one.item for one in records if any(token.lag == lag for token in one.tokens)]
        if text.startswith("g") and text[1:].isdigit():
            return [one.item for one in records if one.group_id == int(text[1:])]
        return [one.item for one in records if text in one.prompt]

    def trajectory(self, group: int, sibling: int) -> Trajectory:
        """Return an answer, or what is left of a dead letter."""
        kin = [one for one in self.records() if one.group_id == group]
        own = next((one for one in kin if one.sibling == sibling), None)
        if own is None:
            return self._unrecorded(group, sibling)
        return Trajectory(
            found=True,
            step=own.step,
            group_id=group,
            sibling=sibling,
            prompt=own.prompt,
            reward=own.reward,
            parts={"correct": own.reward, "format": 0.5},
            finish_reason="stop",
            tokens=own.tokens,
            stretches=list(own.stretches)
            or [Stretch(num_tokens=len(own.tokens), num_drawn=len(own.tokens), turn=1)],
            num_turns=own.num_turns,
            num_branches=own.num_branches,
            num_chosen=len(own.tokens),
            life=own.life,
            siblings=[Sibling(one.sibling, one.reward) for one in kin],
            outcome=own.life[-1].what,
            images=list(self.images),
        )

    def _unrecorded(self, group: int, sibling: int) -> Trajectory:
        letter = next((one for one in self.letters() if one.group_id == group), None)
        if letter is None:
            return Trajectory(found=False, group_id=group, sibling=sibling)
        events = (
            "issued for training",
            f"leased to generator-1, which runs step {max(0, letter.step - 1)}",
            f"dropped: {letter.reason}",
        )
        began_s = STARTED_S + letter.step * 5.0
        return Trajectory(
            found=False,
            group_id=group,
            sibling=sibling,
            prompt=letter.prompt + " (the whole of it)",
            outcome=f"dropped ({letter.reason})",
            failures=letter.failures,
            life=[Moment(began_s + i, what) for i, what in enumerate(events)],
        )

    def advisories(self) -> list[Advisory]:
        """Return what the broker would report of it."""
        trends = trends_of(self.history(), high_water_bytes=0, fsync="everysec")
        return advise(self.status(), trends)

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
        """Return a learner step as the page's stream sends it."""
        point = self.step(step)
        return {"step": step, "at_s": point.at_s, **point.metrics}


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _of_tokens(step: int, done: float) -> dict[str, float]:
    """Return the figures of a step that there are by lag too: means, or for _max the largest."""
    draw = random.Random(step * 7)
    noise = [1 + 0.2 * draw.random() for _ in SHARES]
    entropy = 0.9 - 0.55 * done + draw.gauss(0, 0.012)
    size = 53_000 - 15_000 * done
    tokens = [round(SHARES[lag] * size * n) for lag, n in enumerate(noise)]
    up = [(0.0012 + 0.0042 * lag) * n for lag, n in enumerate(noise)]
    down = [(0.0006 + 0.0021 * lag) * n for lag, n in enumerate(noise)]
    dual = [0.0002 * lag * n for lag, n in enumerate(noise)]
    by_lag = {
        "policy/entropy": [entropy + 0.01 * lag for lag in range(BOUND + 1)],
        "policy/ratio": [1 + 0.0004 * lag * n for lag, n in enumerate(noise)],
        "policy/ratio_max": [(1.4 + 0.9 * lag) * n for lag, n in enumerate(noise)],
        "policy/clip_up": up,
        "policy/clip_down": down,
        "policy/clip_dual": dual,
        "policy/clip_fraction": [sum(parts) for parts in zip(up, down, dual, strict=True)],
        "staleness/masked": [0.0011 * lag * n for lag, n in enumerate(noise)],
        "staleness/mismatch_kl": [(0.0008 + 0.0016 * lag) * n for lag, n in enumerate(noise)],
        "staleness/ess": [0.995 - 0.03 * lag - 0.04 * (n - 1) for lag, n in enumerate(noise)],
        "reward/group_variance": [0.19 + 0.01 * lag - 0.05 * done for lag in range(BOUND + 1)],
    }
    figures = {"policy/tokens": float(sum(tokens))}
    figures |= {f"policy/tokens@lag{lag}": float(count) for lag, count in enumerate(tokens)}
    for name, values in by_lag.items():
        mean = sum(map(mul, values, tokens)) / sum(tokens)
        figures[name] = max(values) if name.endswith("_max") else mean
        figures |= {f"{name}@lag{lag}": value for lag, value in enumerate(values)}
    return figures


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _throttle() -> ThrottleStatus:
    """Return what a staleness target holds back, after two changes."""
    over = "of tokens older than p95_lag = 1 (5% may be) is"
    changes = (
        (12, 60, f"38.1% {over} above its target: 96 -> 60 groups under way"),
        (40, 64, f"0.2% {over} well below its target: 60 -> 64 groups under way"),
    )
    return ThrottleStatus(
        target="p95_lag = 1",
        bound=1,
        in_flight=64,
        most_in_flight=96,
        excess=0.4,
        changes=tuple(
            ThrottleChange(step=step, bound=1, in_flight=in_flight, reason=reason)
            for step, in_flight, reason in changes
        ),
    )


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


def _publish(step: int, generators: Sequence[str], *, is_torn: bool) -> PublishRecord:
    draw = random.Random(step)
    failed = {generators[-1]: "no answer to LoadBucket within 30 s"} if is_torn else {}
    return PublishRecord(
        version=PolicyVersion(1, step),
        at_s=STARTED_S + step * 5.0,
        adopted_by={name: 0.4 + draw.random() * 0.2 for name in generators if name not in failed},
        failed=failed,
        num_in_flight=dict.fromkeys(generators, 10),
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
        transports=dict.fromkeys(generators, "collective"),
    )
