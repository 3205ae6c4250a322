"""The learning rate over learner steps, by Megatron's own scheduler."""

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slipstream.learner.config import LearnerSection


def make_scheduler(
    optimizer: MegatronOptimizer, settings: LearnerSection, *, decay_steps: int
) -> OptimizerParamScheduler:
    """Return a scheduler that has set the learning rate of the first step.

    The warm-up is (s + 1) / (w + 1) of learner.lr at step s of w: Megatron's own would train the
    first step with 0. After a resume the settings override those of the checkpoint; the number of
    steps taken comes from the checkpoint. learner.lr_min is reached at ``decay_steps``.
    """
    warmup = settings.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (warmup + 1),
        max_lr=settings.lr,
        min_lr=settings.lr_min,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(decay_steps, warmup + 1),
        lr_decay_style=settings.lr_schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style=settings.wsd_decay,
    )
