"""Copies of tensors from which a checkpoint is written."""

import io
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.checkpoints.staging import TensorStaging

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def filled(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 99))
def test_copies_hold_what_was_there_whatever_becomes_of_it(
    wanted: list[tuple[list[int], torch.dtype]], seed: int
):
    tensors = [filled(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(wanted)]
    expected = [tensor.clone() for tensor in tensors]
    copies = TensorStaging().copy(tensors)
    for tensor in tensors:
        tensor.fill_(1)
    for copy, values in zip(copies, expected, strict=True):
        assert (copy.dtype, copy.shape) == (values.dtype, values.shape)
        assert torch.equal(copy, values)


def test_copy_of_a_view_has_its_values_alone_and_is_saved_alone():
    whole = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    (copy,) = TensorStaging().copy([whole.T[1:3]])
    assert copy.tolist() == [[1, 5, 9], [2, 6, 10]]
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert copy.untyped_storage().size() == copy.nbytes == 24
    file = io.BytesIO()
    torch.save(copy, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), copy)


def test_the_next_copies_take_the_memory_of_the_ones_before():
    staging = TensorStaging()
    assert staging.num_bytes == 0
    first = staging.copy([torch.zeros(1000), torch.zeros(3, dtype=torch.bool)])
    places = [copy.data_ptr() for copy in first]
    held = staging.num_bytes
    assert held == 4096, "1,000 floats and 3 flags, both on lines of 64 bytes, fill one page"
    second = staging.copy([torch.ones(1000), torch.ones(3, dtype=torch.bool)])
    assert [copy.data_ptr() for copy in second] == places
    assert staging.num_bytes == held
    assert second[0].sum() == 1000
    grown = staging.copy([torch.full((2000,), 2.0)])
    assert staging.num_bytes >= 8000
    assert math.isclose(float(grown[0].sum()), 4000.0)
