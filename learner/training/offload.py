"""What a rank's device holds only while it is used; in between it is on the host.

A tensor that is away keeps its place in the model, in Megatron's buffers and in the optimizer: its
storage is empty until it is used again.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Kind = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage that is empty now, and its content."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None  # bytes on the host; None if nobody needs them


class Tenant:
    """Tensors that are used together."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        keeps_content: bool = True,
        is_constant: bool = False,
    ) -> None:
        """Take the function that returns the tensors there are by now.

        Without ``keeps_content`` what they hold is undefined after a return. What ``is_constant``
        is copied to the host once, and again after ``has_changed``. The host's memory for a tensor
        is kept while that is on the device: torch gives pinned memory back to no other use before
        the GPU has read it, and the next copies would take as much again.
        """
        self._tensors = tensors
        self._keeps_content = keeps_content
        self._is_constant = is_constant
        self._copies: dict[StorageWeakRef, Tensor] = {}  # on the host, of what is alive
        self._away: dict[int, _Away] = {}  # by storage

    def has_changed(self) -> None:
        """Copy what is constant once more when it leaves."""
        self._copies.clear()

    def leave(self) -> None:
        """Move to the host; does nothing for what is there."""
        self._copies = {
            place: copy
            for place, copy in self._copies.items()
            if not place.expired()  # type: ignore[no-untyped-call]
        }
        for tensor in self._tensors():
            storage, place = tensor.untyped_storage(), storage_id(tensor)
            num_bytes = storage.nbytes()
            if num_bytes == 0 or tensor.ndim == 0 or place in self._away:
                continue
            content = self._copied(storage) if self._keeps_content else None
            storage.resize_(0)
            self._away[place] = _Away(storage, num_bytes, content)

    def enter(self) -> None:
        """Move to the device; does nothing for what is there."""
        for away in self._away.values():
            away.storage.resize_(away.num_bytes)
            if away.content is not None:
                _bytes_of(away.storage).copy_(away.content, non_blocking=True)
        self._away.clear()

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the same values on the host, if this one is away."""
        away = self._away.get(storage_id(tensor))
        if away is None or away.content is None:
            return None
        elements = away.content.view(tensor.dtype)
        return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _copied(self, storage: torch.UntypedStorage) -> Tensor:
        place = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        copy = self._copies.get(place)
        if copy is None:
            on_gpu = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            self._copies[place] = copy
        elif self._is_constant:
            return copy
        return copy.copy_(_bytes_of(storage), non_blocking=True)


class Offload:
    """Has on the device what is being used, and nothing else of what may be away."""

    def __init__(self, kinds: Collection[Kind] = ()) -> None:
        """Take what may be away (learner.offload)."""
        self._kinds = frozenset(kinds)
        self._tenants: list[Tenant] = []

    def tenant(
        self,
        kind: Kind,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        keeps_content: bool = True,
        is_constant: bool = False,
    ) -> Tenant:
        """Return tensors that are away while they are not used, if those of their kind may be."""
        tenant = Tenant(tensors, keeps_content=keeps_content, is_constant=is_constant)
        if kind in self._kinds:
            self._tenants.append(tenant)
        return tenant

    def use(self, *tenants: Tenant) -> None:
        """Have these on the device, and no others."""
        for one in self._tenants:
            if one not in tenants:
                one.leave()
        for one in tenants:
            one.enter()

    def put_away(self, sharded_state: dict[str, Any]) -> dict[str, Any]:
        """Move all to the host, and have Megatron's sharded state read and fill what is there.

        What a checkpoint fills there is on the device once it is used.
        """
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        self.use()
        if self._tenants and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are complete

        def at_hand(part: object) -> object:
            if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None:
                part.data = self._at_hand(part.data)
            return part

        dict_list_map_inplace(at_hand, sharded_state)
        return sharded_state

    def _at_hand(self, tensor: Tensor) -> Tensor:
        for one in self._tenants:
            if (copy := one.host_copy(tensor)) is not None:
                return copy
        return tensor


def storage_id(tensor: Tensor) -> int:
    """Return what tensors of one storage have in common, empty or not."""
    place: int = tensor.untyped_storage()._cdata
    return place


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
