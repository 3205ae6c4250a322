"""The critic."""

from slipstream.deploy.interop.verl.hydra import Value
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import Counterpart, Rule, Topic, nothing, number, unless

TOPIC = Topic("Critic")


def without_critic(keys: VerlKeys) -> str:
    """Return why a key of the critic counts for nothing, if it does."""
    return "" if keys.estimator == "gae" else f"{keys.estimator} has no critic"


def _steps(setting: str) -> Rule:
    def rule(value: Value, _: VerlKeys) -> Counterpart:
        return Counterpart({setting: value}) if value else nothing("0, as by default")

    return rule


TOPIC.setting("critic.optim.lr", "algo.critic.lr", unless(without_critic, number))
TOPIC.setting(
    "critic.cliprange_value",
    "algo.critic.clip",
    unless(without_critic, number),
    "0.2 by default; verl has 0.5",
    default=0.5,
)
TOPIC.setting(
    "trainer.critic_warmup",
    "algo.critic.warmup_steps",
    unless(without_critic, _steps),
    "in learner steps",
)
TOPIC.dropped(
    "critic.model.path", "the critic starts from the policy's weights, with a value head of zeros"
)
TOPIC.dropped("critic.enable", "`gae` has a critic, the others have none")
TOPIC.dropped(
    "critic.** critic",
    "the critic is trained with the policy's schedule, batches and layout, on the same GPUs",
)
