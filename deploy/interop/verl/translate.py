"""Keys of verl become settings, with a report on every one of them. Pure."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import HydraSettings, Value
from slipstream.deploy.interop.verl.rows import NOT_SET, Keys, Kind, Out, Row, Settings
from slipstream.deploy.interop.verl.rules import ACTOR, OPTIM, ROLLOUT
from slipstream.deploy.interop.verl.table import ROWS
from slipstream.wire.settings.load import SECTIONS

_UNBOUNDED_STEPS = 1_000_000
_BYTES_PER_TOKEN = 13  # of untrained payload, as [broker] counts them
_HIGH_WATER = 4 * 2**30  # by default
_TOKENS = 8192  # of a microbatch, by default
_STALE_HIGH = 5.0  # of the preset decoupled-ppo
_NAMED = {name: row for row in ROWS for name in row.verl if "*" not in name}


@dataclass(frozen=True, slots=True)
class Told:
    """What is reported of one key."""

    key: str
    kind: Kind
    value: Value
    settings: Settings
    remark: str
    is_default: bool = False  # of verl's, which was not given

    @property
    def fails(self) -> bool:
        """Whether something has to be done before the file is written."""
        return self.kind == "unknown"


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings, what is told of every key, and what is left to do."""

    table: dict[str, object]
    told: list[Told]
    todo: list[str]
    notes: list[str]

    @property
    def failed(self) -> list[Told]:
        """Keys without a translation."""
        return [one for one in self.told if one.fails]


def translate(
    given: HydraSettings, *, home: str = "", vocab_size: int = 0, is_async: bool = False
) -> Translation:
    """Return the settings that do what verl was told to do.

    Args:
        given: keys and values.
        home: the folder that ~ stands for; empty leaves it.
        vocab_size: of the model, 0 if it is not known.
        is_async: train while generators generate, on answers that may be stale.
    """
    keys = Keys(given.values, home=home, vocab_size=vocab_size)
    settings: Settings = {}
    told: list[Told] = []
    todo: list[str] = []
    for key, value in given.values.items():
        if key.rpartition(".")[2] == "_target_":
            continue
        if value is None or value == {}:
            told += _told_null(key)
            continue
        row = row_of(key)
        if row is None:
            told.append(Told(key, "unknown", value, {}, f"not known{nearest(key)}"))
            continue
        out = row.rule(value, keys.at(key)) if row.rule is not None else Out()
        told.append(_told(key, value, row, out))
        todo += [out.todo] if out.todo else []
        _merge(settings, out.settings)
    for row in ROWS:
        verdict, default = _default_of(row, keys)
        if verdict is None or (verdict.settings and verdict.settings.keys() <= settings.keys()):
            continue
        if verdict.settings or verdict.kind in {"changed", "unknown"}:
            told.append(_told_default(row, verdict, default))
            todo += [verdict.todo] if verdict.todo else []
            _merge(settings, verdict.settings, over=False)
    told += [Told(key, "dropped", None, {}, "taken away by ~") for key in given.deleted]
    judges = (_judge_async if is_async else _judge_sync, *JUDGES)
    for judge in judges:
        for one in judge(settings, keys):
            told.append(one)
            settings |= one.settings
            for name in [name for name, value in one.settings.items() if value is None]:
                del settings[name]
    return Translation(nested(settings), told, list(dict.fromkeys(todo)), list(given.remarks))


def row_of(key: str) -> Row | None:
    """Return the row of a key, if it is known: the one that names it, or the first that fits."""
    return _NAMED.get(key) or next((row for row in ROWS if row.fits(key)), None)


def nearest(key: str) -> str:
    """Return the known key that is most like this one, as the end of a sentence."""
    close = difflib.get_close_matches(key, _NAMED, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted names as tables in tables."""
    order = {name: place for place, name in enumerate(SECTIONS)}
    table: dict[str, object] = {}
    for name, value in sorted(settings.items(), key=lambda one: order[one[0].partition(".")[0]]):
        *places, last = name.split(".")
        inner = table
        for place in places:
            found = inner.setdefault(place, {})
            inner = found if isinstance(found, dict) else {}
        inner[last] = value
    return table


def _told_null(key: str) -> list[Told]:
    row = row_of(key)
    if row is None:
        return [Told(key, "unknown", None, {}, f"not known{nearest(key)}")]
    return [Told(key, "dropped", None, {}, "null: not set")]


def _told(key: str, value: Value, row: Row, out: Out) -> Told:
    kind = out.kind or row.usual_kind
    if row.rule is not None and not out.settings and kind in {"kept", "renamed"}:
        kind = "dropped"
    if kind == "unknown":
        return Told(key, kind, value, {}, out.note)
    remark = out.note or _plain(row.remark)
    return Told(key, kind, value, dict(out.settings), remark)


def _told_default(row: Row, out: Out, default: Value) -> Told:
    remark = out.note or _plain(row.remark)
    return Told(row.verl[0], "changed", default, dict(out.settings), remark, is_default=True)


def _plain(remark: str) -> str:
    """Return Markdown of the page as a terminal shows it: a link is its target."""
    linked = re.sub(r"\[[^]]*\]\(#[^)]*\)", "names in docs/coming_from_verl.md", remark)
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", linked).replace("`", "")


def _default_of(row: Row, keys: Keys) -> tuple[Out | None, Value]:
    """Return what verl's default of a row becomes, if none of its keys was given."""
    if row.default is NOT_SET or row.rule is None or any(name in keys for name in row.verl):
        return None, None
    return row.rule(row.default, keys.at(row.verl[0])), row.default


def _merge(settings: Settings, others: Settings, *, over: bool = True) -> None:
    """Add settings to others; lists are joined."""
    for name, value in others.items():
        before = settings.get(name)
        if name == "learner.offload" and isinstance(before, list) and isinstance(value, list):
            settings[name] = [*before, *(one for one in value if one not in before)]
        elif over or name not in settings:
            settings[name] = value


# ---- what settings say together ------------------------------------------------


def _number(settings: Settings, name: str, default: float) -> float:
    value = settings.get(name, default)
    return value if isinstance(value, int | float) else default


def _integer(settings: Settings, name: str, default: int = 1) -> int:
    return int(_number(settings, name, default))


def _verdict(key: str, settings: Settings, remark: str) -> Told:
    return Told(key, "changed", None, settings, remark)


def _judge_sync(settings: Settings, keys: Keys) -> Iterable[Told]:  # noqa: ARG001 as judges are
    yield _verdict(
        "(mode)",
        {"run.mode": "sync"},
        "verl trains on answers of the policy itself; --async lets generators go ahead",
    )


def _judge_async(settings: Settings, keys: Keys) -> Iterable[Told]:  # noqa: ARG001
    yield _verdict("(mode)", {"run.mode": "async"}, "answers may be run.max_staleness_steps old")
    level = "algo.correction.importance-sampling.level"
    if settings.get("algo.anchor") == "proximal" and level not in settings:
        yield _verdict(
            "(mode)",
            {level: "token", "algo.correction.importance-sampling.high": _STALE_HIGH},
            "stale answers are weighed, as algo.preset = decoupled-ppo does",
        )


def _judge_steps(settings: Settings, keys: Keys) -> Iterable[Told]:  # noqa: ARG001
    if "run.steps" not in settings:
        yield _verdict(
            "trainer.total_epochs",
            {"run.steps": _UNBOUNDED_STEPS},
            "run.steps is 100 by default and would end the run first",
        )
    warmup = _integer(settings, "learner.lr_warmup_steps", 0)
    steps = _integer(settings, "learner.lr_decay_steps", 0) or _integer(
        settings, "run.steps", _UNBOUNDED_STEPS
    )
    if settings.get("learner.lr_schedule", "constant") != "constant" and warmup >= steps:
        yield _verdict(
            f"{OPTIM}.lr_warmup_steps",
            {"learner.lr_warmup_steps": steps - 1},
            f"a warm-up of {warmup} steps must end before the decay does, at {steps}",
        )


def _judge_tokens(settings: Settings, keys: Keys) -> Iterable[Told]:
    longest = rules.longest(keys)
    if longest > _integer(settings, "learner.max_tokens_per_microbatch", _TOKENS):
        yield _verdict(
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            {"learner.max_tokens_per_microbatch": longest},
            f"a microbatch must hold the longest sequence, {longest} tokens",
        )
    groups, size = (
        _integer(settings, "run.groups_per_step", 32),
        _integer(settings, "run.group_size", 8),
    )
    num_bytes = groups * size * longest * _BYTES_PER_TOKEN
    if num_bytes > _HIGH_WATER:
        yield _verdict(
            "data.train_batch_size",
            {"broker.high_water_bytes": num_bytes},
            f"a learner step of {groups} x {size} x {longest} tokens can take as many bytes",
        )


def _judge_sequences(settings: Settings, keys: Keys) -> Iterable[Told]:  # noqa: ARG001
    needed = max(_integer(settings, "run.group_size", 8), _integer(settings, "eval.samples", 1))
    if needed > _integer(settings, "generators.max_sequences", 64):
        yield _verdict(
            f"{ROLLOUT}.max_num_seqs",
            {"generators.max_sequences": needed},
            "an engine must hold a whole group",
        )


def _judge_offload(settings: Settings, keys: Keys) -> Iterable[Told]:
    fraction = _number(settings, "learner.optimizer_offload_fraction", 0)
    offload = settings.get("learner.offload")
    if fraction and settings.get("learner.distributed_optimizer") is False:
        yield _verdict(
            f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload",
            {"learner.distributed_optimizer": True},
            "learner.optimizer_offload_fraction needs it",
        )
    if fraction and isinstance(offload, list) and "optimizer" in offload:
        left = [one for one in offload if one != "optimizer"]
        yield _verdict(
            f"{ACTOR}.megatron.optimizer_offload",
            {"learner.offload": left or None},
            "learner.optimizer_offload_fraction keeps the optimizer on the host for good",
        )
    if fraction and "learner.moments_dtype" in settings:
        yield _verdict(
            f"{OPTIM}.override_optimizer_config.exp_avg_dtype",
            {"learner.moments_dtype": None},
            "with learner.optimizer_offload_fraction the optimizer is Megatron's",
        )
    has_kl = keys.has_true(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    if isinstance(offload, list) and "weights" in offload:
        if has_kl or rules.estimator(keys) == "gae":
            return
        held = {"weights", "optimizer"} if fraction else {"weights"}
        left = [one for one in offload if one not in held]
        yield _verdict(
            f"{ACTOR}.fsdp_config.param_offload",
            {"learner.offload": left or None},
            "weights leave the device for another model of the learner, and there is none",
        )


def _judge_recompute(settings: Settings, keys: Keys) -> Iterable[Told]:  # noqa: ARG001
    if settings.get("learner.recompute") != "full" and "learner.recompute_layers" in settings:
        yield _verdict(
            f"{ACTOR}.megatron.override_transformer_config.recompute_num_layers",
            {"learner.recompute_layers": None},
            "it counts with recompute_granularity=full alone",
        )


def _judge_layout(settings: Settings, keys: Keys) -> Iterable[Told]:
    """GPUs of one host for the learner, the others for engines; of several hosts all of them."""
    size = {
        name: _integer(settings, f"learner.{name}")
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")
    }
    dense = math.prod(size.values())
    experts = _integer(settings, "learner.expert_parallel") * _integer(
        settings, "learner.expert_tensor_parallel"
    )
    model = math.lcm(dense, experts * size["pipeline_parallel"]) if experts > 1 else dense
    per_host = keys.integer("trainer.n_gpus_per_node", default=8)
    gpus = per_host * max(1, keys.integer("trainer.nnodes", default=1))
    engine = _integer(settings, "generators.sglang.tp_size")
    trajectories = _integer(settings, "run.groups_per_step", 32) * _integer(
        settings, "run.group_size", 8
    )
    minibatches = _integer(settings, "learner.minibatches")
    last = max(1, _integer(settings, "run.groups_per_step", 32) // 2) * _integer(
        settings, "run.group_size", 8
    )
    most = (
        max(1, min(trajectories // minibatches, last)) * dense
    )  # ranks with work for all replicas
    ranks = max(model, min(gpus // 2, most) // model * model)
    if ranks > per_host:  # whole hosts
        whole = math.lcm(model, per_host)
        ranks = max(whole, ranks // whole * whole)
    count = max(1, (gpus - ranks) // engine)
    updates: Settings = {"learner.ranks": ranks, "generators.count": count}
    if ranks > per_host:
        updates["learner.ranks_per_node"] = per_host
    need = ranks + count * engine
    remark = (
        f"{ranks} GPUs for the learner, {count} x {engine} for engines: verl lent the same ones "
        "to both"
    )
    if need > gpus:
        remark += f"; that needs {need} GPUs, and verl had {gpus}"
    yield _verdict("trainer.n_gpus_per_node", updates, remark)
    most_minibatches = max(1, trajectories // (ranks // dense))
    if minibatches > most_minibatches:
        yield _verdict(
            f"{ACTOR}.ppo_mini_batch_size",
            {"learner.minibatches": most_minibatches},
            f"{trajectories} trajectories cannot be split into more for {ranks // dense} replicas",
        )


Judge = Callable[[Settings, Keys], Iterable[Told]]
JUDGES: Sequence[Judge] = (
    _judge_steps,
    _judge_tokens,
    _judge_sequences,
    _judge_offload,
    _judge_recompute,
    _judge_layout,
)
