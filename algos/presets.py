"""Named compositions. Each follows its paper; docs/algorithms.md lists differences.

Papers that sample and train with one policy call it pi_old: here that is the behavior policy, so
their ratios are anchored there. ``async-default`` is ours, and chosen by the measurements in
docs/staleness.md.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

IMITATION = "sft"
_GRPO: dict[str, Any] = {"name": "grpo"}
_CLIP: dict[str, Any] = {"name": "ppo-clip", "clip_low": 0.2, "clip_high": 0.2}
_CLIP_HIGHER: dict[str, Any] = {"name": "ppo-clip", "clip_low": 0.2, "clip_high": 0.28}
_DECOUPLED: dict[str, Any] = {
    "surrogate": _CLIP,
    "anchor": "proximal",
    "correction": {"importance-sampling": {"level": "token", "high": 5.0}},
}
_PPO: dict[str, Any] = {
    "advantage": {"name": "gae", "discount": 1.0, "decay": 0.95},
    "surrogate": _CLIP,
    "anchor": "behavior",
    "whiten": "batch",
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "async-default": {"advantage": _GRPO, "surrogate": _CLIP, "anchor": "behavior"},
        "decoupled-ppo": {"advantage": _GRPO, **_DECOUPLED},
        "grpo": {
            "advantage": _GRPO,
            "surrogate": _CLIP,
            "anchor": "behavior",
            "reduce": {"name": "sequence-mean-token-mean"},
            "kl": {"coefficient": 0.04, "name": "k3", "place": "loss"},
        },
        "dr-grpo": {
            "advantage": {"name": "grpo", "divide_by_std": False},
            "surrogate": _CLIP,
            "anchor": "behavior",
            "reduce": {"name": "sequence-mean-token-sum-norm"},
        },
        "dapo": {
            "advantage": _GRPO,
            "surrogate": _CLIP_HIGHER,
            "anchor": "behavior",
            "data": {"overlong_buffer": 0.2, "overlong_penalty": 1.0},
        },
        "ppo": _PPO,
        "vapo": {
            "likelihood": {"coefficient": 0.1},
            "advantage": {
                "name": "gae",
                "discount": 1.0,
                "length_adaptive": True,
                "length_alpha": 0.05,
                "critic_decay": 1.0,
            },
            "surrogate": _CLIP_HIGHER,
            "anchor": "behavior",
            "whiten": "batch",
            "critic": {"warmup_steps": 50},
        },
        "gspo": {
            "advantage": _GRPO,
            "surrogate": {"name": "gspo"},
            "anchor": "behavior",
            "reduce": {"name": "sequence-mean-token-mean"},
        },
        "cispo": {"advantage": _GRPO, "surrogate": {"name": "cispo"}, "anchor": "behavior"},
        "scalerl": {
            "advantage": {"name": "grpo", "std_over": "advantages"},
            "surrogate": {"name": "cispo"},
            "anchor": "behavior",
            "reduce": {"name": "group-mean-token-mean"},
            "data": {"zero_variance": "mask"},
        },
        "rloo": {
            "advantage": {"name": "rloo"},
            "surrogate": {"name": "policy-gradient"},
            "correction": {"importance-sampling": {"level": "sequence", "high": 2.0}},
            "reduce": {"name": "sequence-mean-token-sum"},
        },
        "reinforce++": {
            "advantage": {"name": "discounted-returns", "discount": 1.0},
            "surrogate": _CLIP,
            "anchor": "behavior",
            "whiten": "batch",
            "kl": {"coefficient": 0.01, "name": "k1", "place": "reward"},
        },
        "reinforce++-baseline": {
            "advantage": {"name": "reinforce++-baseline"},
            "surrogate": _CLIP,
            "anchor": "behavior",
            "whiten": "batch",
            "kl": {"coefficient": 0.001, "name": "k2", "place": "loss"},
        },
        "pf-ppo": {**_PPO, "data": {"resample": "pow", "resample_power": 5.0}},
        "dppo": {
            "advantage": {"name": "grpo", "divide_by_std": False},
            "surrogate": {"name": "dppo-tv", "clip_low": 0.2, "clip_high": 0.2},
            "anchor": "behavior",
            "kl": {"coefficient": 0.002, "to": "behavior", "name": "k2", "place": "loss"},
        },
        "drpo": {"advantage": _GRPO, "surrogate": {"name": "drpo"}, "anchor": "behavior"},
        "sapo": {
            "advantage": _GRPO,
            "surrogate": {"name": "sapo"},
            "anchor": "behavior",
            "reduce": {"name": "sequence-mean-token-mean"},
        },
        "topr": {
            "advantage": {"name": "grpo", "divide_by_std": False},
            "surrogate": {"name": "topr"},
            "anchor": "behavior",
            "reduce": {"name": "sequence-mean-token-sum-norm"},
        },
        "distill": {"advantage": {"name": "zero"}, **_DECOUPLED, "teacher": {"coefficient": 1.0}},
        IMITATION: {"advantage": {"name": "reinforce"}, "surrogate": {"name": "policy-gradient"}},
        "m2po": {
            "advantage": _GRPO,
            "surrogate": {"name": "reinforce-is"},
            "anchor": "behavior",
            "correction": {"m2po": {}},
        },
    }
)
