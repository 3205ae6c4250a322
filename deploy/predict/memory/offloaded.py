"""Pure: how much of what a rank holds by turns is never on its device at once (learner.offload)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

POLICY, CRITIC = "policy", "critic"
KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors of one kind of one model."""

    owner: str
    kind: str
    num_bytes: float


def never_at_once(
    held: Sequence[Held], offload: Collection[str], *, working: float, beside_policy: str = ""
) -> float:
    """Return by how much the largest moment is below the sum of everything.

    Args:
        held: of all models; owners without gradients are frozen.
        offload: the kinds that are away while they are not used.
        working: bytes that a training pass takes besides, of any model.
        beside_policy: the frozen model that the policy's training uses, too.
    """
    trained = {one.owner for one in held if one.kind == "gradients"}
    frozen = {one.owner for one in held} - trained
    passes = ((owner, ("weights", "gradients")) for owner in sorted(trained))
    updates = ((owner, KINDS) for owner in sorted(trained))

    def on_device(used: Iterable[Held]) -> float:
        there = set(used)
        return sum(one.num_bytes for one in held if one in there or one.kind not in offload)

    def of(owner: str, kinds: Collection[str]) -> list[Held]:
        more = beside_policy if owner == POLICY else ""
        return [
            one for one in held if (one.owner == owner and one.kind in kinds) or (one.owner == more)
        ]

    moments = [working + on_device(of(*one)) for one in passes]
    moments += [on_device(of(*one)) for one in updates]
    moments += [on_device(of(owner, ("weights",))) for owner in sorted(frozen)]
    return working + sum(one.num_bytes for one in held) - max(moments)
