"""The table of verl's keys: what each becomes, or why there is nothing for it.

`slipstream import-verl` applies it and docs/coming_from_verl.md is generated from it. A row
that names a key is its row; else it is the first, from above, whose wildcards fit.
"""

from slipstream.deploy.interop.verl.rows import KeyRow
from slipstream.deploy.interop.verl.topics import (
    algorithm,
    critic,
    data,
    layout,
    loss,
    model,
    optimizer,
    reward,
    rollout,
    run,
)

_MODULES = (data, model, optimizer, layout, loss, rollout, algorithm, critic, reward, run)
TOPICS = tuple(module.TOPIC for module in _MODULES)
# The page's remarks on values of adv_estimator, loss_mode or kl_loss_type besides their settings.
_ALWAYS = "whatever `loss_agg_mode` is, as in verl"
_BEHAVIOR = 'with `algo.anchor = "behavior"` as in the paper (`bypass_mode=True`)'
REMARKS_ON_VALUES = {
    "gae": "the critic comes with it",
    "gdpo": "`algo.advantage.weights` names the parts of the reward",
    "reinforce_plus_plus": 'no KL: the preset `"reinforce++"` has the paper\'s',
    "reinforce_plus_plus_baseline": 'no KL: the preset `"reinforce++-baseline"` has the paper\'s',
    **dict.fromkeys(("gspo", "sapo", "geo_mean"), _ALWAYS),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), _BEHAVIOR),
    "kl_cov": "with `learner.minibatches` above 1",
    "dro": "coefficient = `dro_beta`",
    "low_var_kl": "our `k3` is not bounded at 10",
    "full": "verl lists it and does not compute it",
}
# A key of a profiler may fit a wildcard of an earlier topic, too.
_FIRST = [row for row in run.TOPIC.rows if any("profile" in key for key in row.verl)]
ROWS = (*_FIRST, *(row for topic in TOPICS for row in topic.rows))
_NAMED = {key: row for row in ROWS for key in row.verl if "*" not in key}
NAMES = tuple(_NAMED)  # keys of verl without wildcards


def row_of(key: str) -> KeyRow | None:
    """Return the row of a key, if it is known: the one that names it, or the first that fits."""
    return _NAMED.get(key) or next((row for row in ROWS if row.fits(key)), None)
