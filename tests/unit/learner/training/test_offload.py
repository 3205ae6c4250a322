"""Tensors come back with what they held, and the host holds each of them once."""

import pytest
import torch
from torch import Tensor

from slipstream.learner.training.offload import Offload, Resident


def one_of(offload: Offload, tensors: list[Tensor], **how: bool) -> Resident:
    return offload.take("weights", Resident(lambda: tensors, **how))


def host_memory(resident: Resident, tensors: list[Tensor]) -> list[int]:
    copies = [resident.host_copy(tensor) for tensor in tensors]
    return [copy.untyped_storage().data_ptr() for copy in copies if copy is not None]


def test_views_of_a_storage_come_back_together():
    whole = torch.arange(12.0)
    views = [whole[:4].view(2, 2), whole[4:], whole.view(3, 4).t()]
    expected = [view.clone() for view in views]
    offload = Offload(["weights"])
    resident = one_of(offload, views)
    offload.use()
    assert whole.untyped_storage().nbytes() == 0
    for view, value in zip(views, expected, strict=True):
        copy = resident.host_copy(view)
        assert copy is not None
        assert copy.equal(value)
    offload.use(resident)
    assert all(view.equal(value) for view, value in zip(views, expected, strict=True))


def test_the_next_copies_take_the_memory_of_the_last():
    tensors = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16)]
    offload = Offload(["weights"])
    resident = one_of(offload, tensors)
    offload.use()
    first = host_memory(resident, tensors)
    offload.use(resident)
    for tensor in tensors:
        tensor += 1
    offload.use()
    assert host_memory(resident, tensors) == first
    offload.use(resident)
    assert all(tensor.eq(2).all() for tensor in tensors)


def test_tensors_that_take_the_place_of_others_get_memory_of_their_own():
    tensors = [torch.ones(3)]
    offload = Offload(["weights"])
    resident = one_of(offload, tensors)
    for size in (3, 4, 4):
        offload.use()
        loaded = resident.host_copy(tensors[0])
        assert loaded is not None
        offload.use(resident)
        tensors[0] = loaded  # a CPU loads a state without a copy
        tensors.append(torch.full((size,), float(size)))
        before = [tensor.clone() for tensor in tensors]
        offload.use()
        offload.use(resident)
        assert all(one.equal(value) for one, value in zip(tensors, before, strict=True))


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_constant_is_copied_again_where_it_has_changed(is_told: bool):
    (tensor,) = tensors = [torch.ones(3)]
    offload = Offload(["weights"])
    resident = one_of(offload, tensors, is_constant=True)
    offload.use()
    offload.use(resident)
    tensor += 1
    if is_told:
        resident.has_changed()
    offload.use()
    offload.use(resident)
    assert tensor.tolist() == [2.0 if is_told else 1.0] * 3


def test_kinds_that_are_not_named_stay():
    tensor = torch.ones(3)
    offload = Offload(["gradients"])
    resident = one_of(offload, [tensor])
    offload.use()
    assert tensor.untyped_storage().nbytes()
    assert resident.host_copy(tensor) is None
