"""The run: its length, name, checkpoints, evaluation, trackers, hosts and profiles."""

import re
from typing import get_args

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import (
    Counterpart,
    Kind,
    Rule,
    Settings,
    Topic,
    expected,
    nothing,
)
from slipstream.wire.settings.sections import TrackerName

TOPIC = Topic("Run")
_trainer = TOPIC.below("trainer")
_LARGEST_NAME = 120  # bytes

# ---- length, checkpoints, evaluation -------------------------------------------

_trainer.setting(
    "total_epochs",
    "run.epochs",
    rules.number,
    "`run.steps`, 100 by default, is raised so that the epochs end the run",
    default=30,
)
_trainer.setting(
    "total_training_steps", "run.steps", rules.integer, "whichever of the two comes first"
)


def _every(section: str, never: Settings, note: str) -> Rule:
    """Return the rule of a number of steps, which is ``never`` below 1."""

    def rule(value: Value, _: VerlKeys) -> Counterpart:
        if not isinstance(value, int):
            return expected("a whole number", value)
        if value > 0:
            return Counterpart({f"{section}.every_steps": value})
        settings = {f"{section}.every_steps": 0, **never}
        return Counterpart(settings, "changed", f"{value} is written 0{note}")

    return rule


_trainer.rule("save_freq", "checkpoint.every_steps", "-1 is written 0", kind="renamed")(
    _every(
        "checkpoint", {}, "; a checkpoint is written at the end nevertheless (checkpoint.at_end)"
    )
)


@_trainer.rule(
    "max_actor_ckpt_to_keep", "checkpoint.keep_last", "2 by default; verl keeps all", default="all"
)
def _kept_checkpoints(value: Value, _: VerlKeys) -> Counterpart:
    if isinstance(value, int) and value > 0:
        return Counterpart({"checkpoint.keep_last": value})
    note = "verl keeps all checkpoints, Slipstream the newest checkpoint.keep_last = 2"
    return Counterpart({}, "changed", note)


_trainer.rule(
    "test_freq",
    "eval.every_steps eval.at_end",
    "-1 is written 0, and `eval.at_end = false`",
    kind="renamed",
    default=-1,
)(_every("eval", {"eval.at_end": False}, ", and nothing is evaluated at the end either"))
_trainer.setting("val_before_train", "eval.before_train", rules.switch)
_trainer.setting("log_val_generations", "eval.keep_answers", rules.integer, "256 by default")


@_trainer.rule(
    "resume_mode resume_from_path",
    "",
    "an argument: `slipstream run --resume auto`, or a folder; checkpoints of verl are not read",
    kind="dropped",
)
def _resume(value: Value, _: VerlKeys) -> Counterpart:
    if value == "disable":
        return nothing("a new run is started unless --resume is given")
    if value == "auto":
        return nothing("an argument: slipstream run --resume auto")
    return nothing(
        "verl's checkpoints are not read: export them as a Hugging Face folder (run.model)"
    )


# ---- names and trackers --------------------------------------------------------

_trainer.setting(
    "default_local_dir",
    "run.dir",
    rules.path,
    "the folder of all runs: a run's own is DIR/NAME",
    kind="changed",
)
_trainer.setting("project_name", "logging.project", rules.text)


@_trainer.rule("experiment_name", "run.name", "the name of a folder, too")
def _name(value: Value, _: VerlKeys) -> Counterpart:
    name = re.sub(r"[^\w.+=@ -]+", "-", str(value)).strip("-. ")
    name = name.encode()[:_LARGEST_NAME].decode("utf-8", "ignore") or "run"
    if name == value:
        return Counterpart({"run.name": name})
    return Counterpart({"run.name": name}, "changed", "it is the name of a folder")


@_trainer.rule(
    "logger", "logging.trackers", "without `console`, which is always written to", kind="renamed"
)
def _trackers(value: Value, _: VerlKeys) -> Counterpart:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = [name for name in names if name in get_args(TrackerName)]
    others = [name for name in names if name not in {*known, "console", "file"}]
    notes = []
    if "console" in names:
        notes.append("the console is always written to")
    if "file" in names:
        notes.append("a run's figures are in its folder anyway")
    if others:
        notes.append(f"there is no {', '.join(others)}")
    kind: Kind | None = "changed" if notes else None
    return Counterpart({"logging.trackers": known}, kind, "; ".join(notes))


# ---- hosts and devices ---------------------------------------------------------

_trainer.rule(
    "n_gpus_per_node",
    "deploy.gpus_per_host learner.ranks generators.count",
    "learner and generators have GPUs of their own: `import-verl` gives the learner about half "
    "of them",
    kind="changed",
    default=8,
)(rules.integer("deploy.gpus_per_host"))


@_trainer.rule(
    "nnodes",
    "deploy.hosts",
    "names of hosts, not a number; `--on hosts` prints the commands of each; `--on ray` or "
    "`slipstream render` start several ([clusters.md](clusters.md))",
    kind="changed",
)
def _hosts(value: Value, _: VerlKeys) -> Counterpart:
    if value == 1:
        return nothing("one host, as by default")
    return Counterpart(
        {},
        "changed",
        "hosts are named, not counted, and learner and generators have GPUs of their own",
        f"deploy.hosts: the names of your {value} hosts; or --on ray, or slipstream render slurm "
        "(docs/clusters.md)",
    )


_trainer.setting(
    "device",
    "generators.device",
    rules.choice({"cuda": "cuda", "cpu": "cpu", "npu": "auto"}),
    "`cuda` or `cpu`",
)


@TOPIC.rule(
    "global_profiler.steps trainer.profile_steps",
    "profile.steps",
    "first and last step, of torch's profiler",
    kind="changed",
)
def _profiled(value: Value, _: VerlKeys) -> Counterpart:
    numbers = value if isinstance(value, list) else []
    steps = [step for step in numbers if isinstance(step, int) and step >= 1]
    if not steps:
        return nothing("no step is traced")
    note = "first and last step, and torch's profiler, whichever tool verl took"
    return Counterpart({"profile.steps": [min(steps), max(steps)]}, "changed", note)


# ---- the rest ------------------------------------------------------------------

_EVALUATES = "there is no run that evaluates alone"
_trainer.rule("val_only", "", _EVALUATES, kind="dropped")(rules.just(False, _EVALUATES))
_trainer.dropped(
    "rollout_data_dir validation_data_dir log_train_generations",
    "answers are in `rollouts/` and `eval/` of the run folder",
)
_trainer.dropped("balance_batch", "always on")
_trainer.dropped(
    "v1.** use_v1",
    "roles are processes of their own; `run.mode` and `run.max_staleness_steps` say how far they "
    "may be apart",
)
_trainer.dropped(
    "default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep "
    "ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl "
    "dump_high_diff_tokens dump_high_diff_dir",
    "of verl's trainer and its workers in Ray",
)
TOPIC.dropped(
    "global_profiler.** *.profiler.** *.*.profiler.** profile.** "
    "*.profile_ranks *.profile_ranks_all *.profile_discrete "
    "*.*.profile_ranks *.*.profile_ranks_all *.*.profile_discrete",
    "`[profile]` traces the learner's ranks; engines have SGLang's own profiler",
)
TOPIC.dropped(
    "ray_init.** ray_kwargs.** transfer_queue.** skip.** atropos.**",
    "there is no Ray between the roles; `[deploy.ray]` starts them on a cluster",
)
TOPIC.dropped(
    "--config-path --config-name --config-dir -cn -cp -cd --multirun -m --cfg --resolve "
    "hydra.** defaults *@** *@* actor@actor_rollout_ref.actor --* critic@**",
    "switches of Hydra's; one TOML file is all there is",
)
