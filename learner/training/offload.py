"""Tensors that are on a rank's device only while used, and on the host in between.

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
    """An emptied storage, and its content."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: Tensor | None  # bytes on the host; None if not needed


class Resident:
    """Tensors that are used together."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        *,
        keeps_content: bool = True,
        is_constant: bool = False,
    ) -> None:
        """Take the function that returns the present tensors.

        Without ``keeps_content`` the tensors' content is undefined after their return. Constant
        tensors (``is_constant``) are copied to the host once, and again after ``has_changed``. The
        host's memory for a tensor is kept while the tensor is on the device: torch frees pinned
        memory for other uses only after the GPU has read it, and the next copies would take as
        much again.
        """
        self._tensors = tensors
        self._keeps_content = keeps_content
        self._is_constant = is_constant
        self._copies: dict[StorageWeakRef, Tensor] = {}  # host copies of live storages
        self._away: dict[int, _Away] = {}  # emptied storages, by id

    def has_changed(self) -> None:
        """Have constant tensors copied again when they next leave."""
        self._copies.clear()

    def leave(self) -> None:
        """Move to the host; does nothing for tensors already there."""
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
        """Move to the device; does nothing for tensors already there."""
        for away in self._away.values():
            away.storage.resize_(away.num_bytes)
            if away.content is not None:
                _bytes_of(away.storage).copy_(away.content, non_blocking=True)
        self._away.clear()

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the same values on the host, if this tensor is away."""
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
    """Keeps on the device, of all tensors that may be away, only those in use."""

    def __init__(self, kinds: Collection[Kind] = ()) -> None:
        """Take the kinds of tensors that may be away (learner.offload)."""
        self._kinds = frozenset(kinds)
        self._residents: list[Resident] = []

    def take(self, kind: Kind, resident: Resident) -> Resident:
        """Return tensors, which are away while not in use if their kind may be."""
        if kind in self._kinds:
            self._residents.append(resident)
        return resident

    def use(self, *residents: Resident) -> None:
        """Have only these residents on the device."""
        for resident in self._residents:
            if resident not in residents:
                resident.leave()
        for resident in residents:
            resident.enter()

    def put_away(self, sharded_state: dict[str, Any]) -> dict[str, Any]:
        """Move all to the host, and have Megatron's sharded state read and fill the host's copies.

        A filled copy reaches the device at its next use.
        """
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        self.use()
        if self._residents and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies are complete

        def at_hand(part: object) -> object:
            if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None:
                part.data = self._at_hand(part.data)
            return part

        dict_list_map_inplace(at_hand, sharded_state)
        return sharded_state

    def _at_hand(self, tensor: Tensor) -> Tensor:
        for resident in self._residents:
            if (copy := resident.host_copy(tensor)) is not None:
                return copy
        return tensor


def storage_id(tensor: Tensor) -> int:
    """Return an id common to all tensors of one storage, empty or not."""
    place: int = tensor.untyped_storage()._cdata
    return place


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
