"""Rewards: functions, their options, and the penalty of length."""

from functools import partial

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys, each
from slipstream.deploy.interop.verl.rows import OFF, Counterpart, Settings, Topic, nothing, refused

TOPIC = Topic("Rewards")
_FUNCTION, _NAME = (
    each(("custom_reward_function", "reward.custom_reward_function"), name)
    for name in ("path", "name")
)
_OVERLONG = (
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
)
_overlong, _reward = TOPIC.below(*_OVERLONG), TOPIC.below("reward_model", "reward")
_REWARDS = "slipstream.broker.rewards."
_SCORES = {  # verl's scores by data_source, and the reward that reads the same answers
    "openai/gsm8k": "numeric:score",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code:score"),
}


# ---- functions -----------------------------------------------------------------


@TOPIC.rule(
    _FUNCTION,
    "reward.function reward.sources.*.function",
    "`FILE.py:NAME`. Without one verl scores by `data_source`: `openai/gsm8k` becomes "
    "`numeric`, code `code`, everything else `math_answer` ([rewards.md](rewards.md))",
    kind="renamed",
    default="",
)
def _function(value: Value, keys: VerlKeys) -> Counterpart:
    if value:
        name = keys.get(_NAME) or "compute_score"
        return Counterpart({"reward.function": f"{keys.path(value)}:{name}"})
    settings: Settings = {"reward.function": f"{_REWARDS}math_answer:score"}
    for source, function in _SCORES.items():
        settings[f"reward.sources.{source}.function"] = _REWARDS + function
    return Counterpart(
        settings,
        "changed",
        "verl chooses a score by data_source. Here openai/gsm8k is compared as a number, code is "
        "run in a sandbox, and everything else is compared as mathematics (math-verify)",
        "reward: slipstream reward test run.toml shows what the functions say to your rows",
    )


TOPIC.written_with(
    "custom_reward_function.path", _NAME, "reward.function", "the part after the colon"
)

# ---- penalty of length ---------------------------------------------------------


def _without_penalty(keys: VerlKeys) -> str:
    enabled = keys.get(each(_OVERLONG, "enable"), default=True)
    length = keys.number(each(_OVERLONG, "len"))
    return "the penalty is off" if enabled is False or length <= 0 else ""


@_overlong.rule(
    "len",
    "algo.data.overlong_buffer",
    "a share of `sampling.max_response_tokens`; the penalty stops growing at the limit",
    kind="changed",
)
def _overlong_length(value: Value, keys: VerlKeys) -> Counterpart:
    if reason := _without_penalty(keys):
        return nothing(reason)
    share = float(value) / keys.response_tokens if isinstance(value, int | float) else 2.0
    if share > 1:
        return refused(f"{value!r} is longer than data.max_response_length")
    note = "a share of sampling.max_response_tokens; the penalty stops growing at the limit"
    return Counterpart({"algo.data.overlong_buffer": share}, "changed", note)


_overlong.setting(
    "penalty_factor", "algo.data.overlong_penalty", rules.unless(_without_penalty, rules.number)
)
TOPIC.dropped(
    each(_OVERLONG, "enable log")
    + " reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len",
    "the buffer is on if it has a length, and of `sampling.max_response_tokens`",
)

# ---- options and workers -------------------------------------------------------


@TOPIC.below(
    "custom_reward_function", "reward.custom_reward_function", "reward_model", "reward"
).rule("reward_kwargs.**", "reward.options.*", "keyword arguments of the function", kind="kept")
def _option(value: Value, keys: VerlKeys) -> Counterpart:
    name = keys.key.rpartition("reward_kwargs.")[2]
    if not keys.get(_FUNCTION):
        return nothing("an argument of verl's own score, and no function of one's own is named")
    if "." in name:
        return refused("an argument that is a table: write it into [reward.options]")
    return Counterpart({f"reward.options.{name}": value})


@TOPIC.rule(
    "reward_model.reward_manager reward.reward_manager.name reward_manager.name reward_manager",
    "",
    "reward workers call the function in parallel, whatever the manager was; one that takes a "
    "batch says so itself",
    kind="dropped",
)
def _manager(value: Value, _: VerlKeys) -> Counterpart:
    if value not in ("batch", "batched"):
        return nothing("reward workers call the function in parallel, whatever its manager was")
    return Counterpart(
        {},
        "changed",
        "verl's signature of lists is not called; a batch is asked for by the function itself",
        'reward.function: decorate it with @reward(takes="batch") (docs/rewards.md)',
    )


_reward.setting(
    "num_workers", "reward.processes", rules.integer, "child processes of one reward worker"
)
_reward.setting(
    "num_examine",
    "learner.rollouts_per_step",
    partial(rules.integer, least=0),
    "written to `rollouts/`, shown by `slipstream show`",
    kind="changed",
)


TOPIC.left_to_write(
    "reward_model.enable reward.reward_model.enable reward_model.grm.enable",
    "reward.function",
    "a reward function asks the server of a reward model: no role holds one",
    "no role holds a reward model: a reward function asks a server that does",
    "reward.function: a function that asks your reward model's server, or "
    "slipstream.broker.rewards.judge:LlmJudge (docs/rewards.md)",
    off=OFF,
)
TOPIC.dropped(
    "reward_model.sandbox_fusion.** reward_model.sandbox_fusion_url reward.sandbox_fusion.** "
    "sandbox_fusion.**",
    "code runs in the sandbox of the reward worker (`slipstream.broker.rewards.code:score`)",
)
TOPIC.dropped(
    "reward_model.launch_reward_fn_async reward.launch_reward_fn_async "
    "reward_model.use_reward_loop reward_model.reward_loop_* reward_model.reward_loop_source "
    "reward_model.reward_loop_module_path reward_model.reward_loop_class_name "
    "reward_manager.** reward.reward_manager.**",
    "answers are scored as they come, by processes of their own",
)
TOPIC.dropped(
    "reward_model.** reward.reward_model.** reward.** trainer.grm_nnodes",
    "of a reward model, which is a server of your own here",
)
