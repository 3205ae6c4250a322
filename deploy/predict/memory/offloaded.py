"""Pure: the part of a rank's memory that is never on its device at once (learner.offload)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

POLICY, CRITIC = "policy", "critic"
KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class OffloadedBytes:
    """Tensors of one kind of one model."""

    owner: str
    kind: str
    num_bytes: float


def never_at_once(
    held: Sequence[OffloadedBytes],
    offload: Collection[str],
    *,
    working: float,
    beside_policy: str = "",
) -> float:
    """Return by how much the largest moment is below the sum of everything.

    Args:
        held: Tensors of all models; owners without gradients are frozen.
        offload: kinds that leave the device while they are unused.
        working: additional bytes of a training pass of any model.
        beside_policy: frozen model that the policy's training also uses.
    """
    trained = {part.owner for part in held if part.kind == "gradients"}
    frozen = {part.owner for part in held} - trained
    passes = ((owner, ("weights", "gradients")) for owner in sorted(trained))
    updates = ((owner, KINDS) for owner in sorted(trained))

    def on_device(used: Iterable[OffloadedBytes]) -> float:
        there = set(used)
        return sum(part.num_bytes for part in held if part in there or part.kind not in offload)

    def of(owner: str, kinds: Collection[str]) -> list[OffloadedBytes]:
        more = beside_policy if owner == POLICY else ""
        return [
            part
            for part in held
            if (part.owner == owner and part.kind in kinds) or (part.owner == more)
        ]

    moments = [working + on_device(of(*use)) for use in passes]
    moments += [on_device(of(*use)) for use in updates]
    moments += [on_device(of(owner, ("weights",))) for owner in sorted(frozen)]
    return working + sum(part.num_bytes for part in held) - max(moments)
