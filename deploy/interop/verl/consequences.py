"""Settings that follow from several keys of verl together. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence

from slipstream.deploy.interop.verl.keys import ACTOR, OPTIM, ROLLOUT, VerlKeys
from slipstream.deploy.interop.verl.rows import Settings, TranslatedKey

_UNBOUNDED_STEPS = 1_000_000
_BYTES_PER_TOKEN = 13  # untrained payload, as [broker] counts it
_HIGH_WATER = 4 * 2**30  # default of broker.high_water_bytes
_STALE_HIGH = 5.0  # bound of the preset decoupled-ppo
_DEFAULTS = {
    "run.groups_per_step": 32,
    "run.group_size": 8,
    "run.steps": _UNBOUNDED_STEPS,
    "generators.max_sequences": 64,
    "learner.max_tokens_per_microbatch": 8192,
    "learner.lr_warmup_steps": 0,
    "learner.lr_decay_steps": 0,
    "learner.optimizer_offload_fraction": 0,
}


def _number(settings: Settings, name: str) -> float:
    """Return a number among settings, else its default: 1 unless listed."""
    default = _DEFAULTS.get(name, 1)
    value = settings.get(name, default)
    return value if isinstance(value, int | float) else default


def _integer(settings: Settings, name: str) -> int:
    return int(_number(settings, name))


def _follows(key: str, settings: Settings, reason: str) -> TranslatedKey:
    return TranslatedKey(key, "changed", None, settings, reason)


def mode(settings: Settings, is_async: bool) -> Iterator[TranslatedKey]:
    """Yield whether generators wait for the learner."""
    if not is_async:
        yield _follows(
            "(mode)",
            {"run.mode": "sync"},
            "verl trains on answers of the policy itself; --async lets generators go ahead",
        )
        return
    yield _follows("(mode)", {"run.mode": "async"}, "answers may be run.max_staleness_steps old")
    sampling = "algo.correction.importance-sampling"
    if settings.get("algo.anchor") == "proximal" and f"{sampling}.level" not in settings:
        yield _follows(
            "(mode)",
            {f"{sampling}.level": "token", f"{sampling}.high": _STALE_HIGH},
            "stale answers are weighed, as algo.preset = decoupled-ppo does",
        )


def _steps(settings: Settings, _: VerlKeys) -> Iterator[TranslatedKey]:
    if "run.steps" not in settings:
        yield _follows(
            "trainer.total_epochs",
            {"run.steps": _UNBOUNDED_STEPS},
            "run.steps is 100 by default and would end the run first",
        )
    warmup = _integer(settings, "learner.lr_warmup_steps")
    steps = _integer(settings, "learner.lr_decay_steps") or _integer(settings, "run.steps")
    if settings.get("learner.lr_schedule", "constant") != "constant" and warmup >= steps:
        yield _follows(
            f"{OPTIM}.lr_warmup_steps",
            {"learner.lr_warmup_steps": steps - 1},
            f"a warm-up of {warmup} steps must end before the decay does, at {steps}",
        )


def _tokens(settings: Settings, keys: VerlKeys) -> Iterator[TranslatedKey]:
    longest = keys.longest
    if longest > _integer(settings, "learner.max_tokens_per_microbatch"):
        yield _follows(
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            {"learner.max_tokens_per_microbatch": longest},
            f"a microbatch must hold the longest sequence, {longest} tokens",
        )
    groups, size = (_integer(settings, f"run.{name}") for name in ("groups_per_step", "group_size"))
    num_bytes = groups * size * longest * _BYTES_PER_TOKEN
    if num_bytes > _HIGH_WATER:
        yield _follows(
            "data.train_batch_size",
            {"broker.high_water_bytes": num_bytes},
            f"a learner step of {groups} x {size} x {longest} tokens can take as many bytes",
        )


def _sequences(settings: Settings, _: VerlKeys) -> Iterator[TranslatedKey]:
    needed = max(_integer(settings, name) for name in ("run.group_size", "eval.samples"))
    if needed > _integer(settings, "generators.max_sequences"):
        yield _follows(
            f"{ROLLOUT}.max_num_seqs",
            {"generators.max_sequences": needed},
            "an engine must hold a whole group",
        )


def _offload(settings: Settings, keys: VerlKeys) -> Iterator[TranslatedKey]:
    listed = settings.get("learner.offload")
    offload = listed if isinstance(listed, list) else []
    idle = []  # what need not be in the list
    if _number(settings, "learner.optimizer_offload_fraction"):
        idle.append("optimizer")
        if "optimizer" in offload:
            yield _follows(
                f"{ACTOR}.megatron.optimizer_offload",
                {"learner.offload": [what for what in offload if what not in idle] or None},
                "learner.optimizer_offload_fraction keeps the optimizer on the host for good",
            )
        if "learner.moments_dtype" in settings:
            yield _follows(
                f"{OPTIM}.override_optimizer_config.exp_avg_dtype",
                {"learner.moments_dtype": None},
                "with learner.optimizer_offload_fraction the optimizer is Megatron's",
            )
    if "weights" in offload and not keys.has_kl and keys.estimator != "gae":
        idle.append("weights")
        yield _follows(
            f"{ACTOR}.fsdp_config.param_offload",
            {"learner.offload": [what for what in offload if what not in idle] or None},
            "weights leave the device for another model of the learner, and there is none",
        )


def _recompute(settings: Settings, _: VerlKeys) -> Iterator[TranslatedKey]:
    if settings.get("learner.recompute") != "full" and "learner.recompute_layers" in settings:
        yield _follows(
            f"{ACTOR}.megatron.override_transformer_config.recompute_num_layers",
            {"learner.recompute_layers": None},
            "it counts with recompute_granularity=full alone",
        )


def _layout(settings: Settings, keys: VerlKeys) -> Iterator[TranslatedKey]:
    """GPUs of one host for the learner, the others for engines; of several hosts all of them."""
    tensor, pipeline, context, experts, expert_tensor = (
        _integer(settings, f"learner.{name}_parallel")
        for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    )
    dense, experts = tensor * pipeline * context, experts * expert_tensor
    model = math.lcm(dense, experts * pipeline) if experts > 1 else dense
    per_host = max(1, keys.integer("trainer.n_gpus_per_node", default=8))
    gpus = per_host * max(1, keys.integer("trainer.nnodes", default=1))
    engine = _integer(settings, "generators.sglang.tp_size")
    groups, size = (_integer(settings, f"run.{name}") for name in ("groups_per_step", "group_size"))
    trajectories, minibatches = groups * size, _integer(settings, "learner.minibatches")
    # Each replica needs a trajectory in every minibatch, and in half a step's groups.
    replicas = max(1, min(trajectories // minibatches, max(1, groups // 2) * size))
    ranks = max(model, min(gpus // 2, replicas * dense) // model * model)
    if ranks > per_host:  # whole hosts
        whole = math.lcm(model, per_host)
        ranks = max(whole, ranks // whole * whole)
    count = max(1, (gpus - ranks) // engine)
    updates: Settings = {"learner.ranks": ranks, "generators.count": count}
    if ranks > per_host:
        updates["learner.ranks_per_node"] = per_host
    need = ranks + count * engine
    reason = (
        f"{ranks} GPUs for the learner, {count} x {engine} for engines: verl lent the same ones "
        "to both"
    )
    if need > gpus:
        reason += f"; that needs {need} GPUs, and verl had {gpus}"
    yield _follows("trainer.n_gpus_per_node", updates, reason)
    most_minibatches = max(1, trajectories // (ranks // dense))
    if minibatches > most_minibatches:
        yield _follows(
            f"{ACTOR}.ppo_mini_batch_size",
            {"learner.minibatches": most_minibatches},
            f"{trajectories} trajectories cannot be split into more for {ranks // dense} replicas",
        )


Consequence = Callable[[Settings, VerlKeys], Iterator[TranslatedKey]]
CONSEQUENCES: Sequence[Consequence] = (_steps, _tokens, _sequences, _offload, _recompute, _layout)
