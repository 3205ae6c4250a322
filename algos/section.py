"""The section [algo], as every role can read it without torch."""

from typing import Annotated, Any, Literal

import msgspec

Table = dict[str, Any]
Whiten = Literal[
    "none",
    "batch",
    "group",
    "batch-mean",
    "group-mean",
    "batch-leave-one-out",
    "group-leave-one-out",
]


class AlgoSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[algo]: the learning algorithm, composed of named parts.

    A preset names all parts; other settings replace parts of it. A part is its name, or a
    table with its name and its settings, which the tables below list: `algo.surrogate = "gspo"`, or
    `algo.surrogate.clip_high = 0.28` to change one setting of the preset's. Corrections are tables
    by name (`algo.correction.rejection.high = 5`); `algo.correction = "none"` takes the preset's
    away. A part of one's own is `FILE.py:FUNCTION` or `MODULE:FUNCTION`. See
    [algorithms.md](algorithms.md).
    """

    preset: str = "async-default"
    """Named composition to start from."""
    advantage: str | Table = ""
    """How much better than expected a trajectory or token was."""
    surrogate: str | Table = ""
    """The function to differentiate."""
    anchor: Literal["", "proximal", "behavior"] = ""
    """Policy below the line of the ratio; proximal decouples clipping from staleness."""
    correction: str | Table = ""
    """Corrections of staleness and of numerics between learner and engine, combined."""
    reduce: str | Table = ""
    """How losses of tokens become one number."""
    whiten: Literal["", Whiten] = ""
    """Shift and scale the advantages of tokens to mean 0 and deviation 1; or shift them only, by
    the mean of all tokens, or of all but the token itself."""
    entropy_bonus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Weight of the mean entropy, which is added to the objective."""
    kl: Table = msgspec.field(default_factory=dict)
    """Divergence from a reference policy, or from the behavior policy."""
    teacher: Table = msgspec.field(default_factory=dict)
    """A policy to distill from."""
    likelihood: Table = msgspec.field(default_factory=dict)
    """Imitation of right answers."""
    critic: Table = msgspec.field(default_factory=dict)
    """The value model."""
    data: Table = msgspec.field(default_factory=dict)
    """Rules for rewards and for the trained part of a batch."""
