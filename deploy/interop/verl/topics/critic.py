"""The critic."""

from slipstream.deploy.interop.verl import rules
from slipstream.deploy.interop.verl.keys import VerlKeys
from slipstream.deploy.interop.verl.rows import Topic

TOPIC = Topic("Critic")
_critic = TOPIC.below("critic")


def without_critic(keys: VerlKeys) -> str:
    """Return why a key of the critic counts for nothing, if it does."""
    return "" if keys.estimator == "gae" else f"{keys.estimator} has no critic"


_critic.setting("optim.lr", "algo.critic.lr", rules.unless(without_critic, rules.number))
_critic.setting(
    "cliprange_value",
    "algo.critic.clip",
    rules.unless(without_critic, rules.number),
    "0.2 by default; verl has 0.5",
    default=0.5,
)
TOPIC.setting(
    "trainer.critic_warmup",
    "algo.critic.warmup_steps",
    rules.unless(without_critic, rules.present("0, as by default")),
    "in learner steps",
)
_critic.dropped(
    "model.path", "the critic starts from the policy's weights, with a value head of zeros"
)
_critic.dropped("enable", "`gae` has a critic, the others have none")
TOPIC.dropped(
    "critic.** critic",
    "the critic is trained with the policy's schedule, batches and layout, on the same GPUs",
)
