"""Bytes that operators and Triton's interpreted kernels read and write, by group.

A mode of torch's dispatcher sees each operator: it counts the memory of distinct tensors that the
operator takes (read) and gives or changes (written, and read unless it is overwritten). Views move
nothing, an expanded tensor has its real memory, a gather reads what it gathers. Kernels are seen by
the loads and stores of Triton's interpreter, each by the distinct addresses that its mask lets
through, so that a kernel that reads its input twice counts it twice. Exchanges between ranks do not
count.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

OTHER, PRODUCTS, ACCUMULATION, LOGITS, ROWS = "other", "products", "accumulation", "logits", "rows"
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}
_MOVING_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MOVING_NOTHING |= {"set_", "_unsafe_view", "_sparse_coo_tensor_with_dims_and_tensors"}
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
_GATHERING = {"gather", "index", "index_select", "embedding"}


def memory(*tensors: Tensor | None) -> int:
    """Return the bytes of memory that distinct tensors occupy."""
    distinct = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in tensors if t is not None}
    return sum(
        t.element_size()
        * math.prod(n if step else min(n, 1) for n, step in zip(t.shape, t.stride(), strict=True))
        for t in distinct.values()
    )


class MovedBytes(TorchDispatchMode):
    """Counts while it is entered.

    The group of an operator is that of the innermost function ``grouped``; in a backward pass, that
    of the forward operator. Some operators are told apart by what they touch: products, whose group
    has no more than the logits that they write; what is done to ``gradients`` outside of any group;
    and, of the group of logits, what touches no logits.
    """

    def __init__(
        self, *, is_logits: Callable[[Tensor], bool], gradients: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self.moved: Counter[tuple[str, str]] = Counter()  # bytes by group and operator
        self._is_logits = is_logits
        self._gradients = {tensor.untyped_storage().data_ptr() for tensor in gradients}
        self._groups = [OTHER]
        self._regions: list[tuple[range, str]] = []  # autograd's numbers of nodes, inner ones first
        self._is_paused = False

    def by_group(self) -> Counter[str]:
        """Return the bytes of each group."""
        total: Counter[str] = Counter()
        for (group, _), count in self.moved.items():
            total[group] += count
        return total

    def grouped(self, owner: object, name: str, group: str) -> None:
        """Give what a function does, and its backward pass, to a group."""
        function = getattr(owner, name)

        @wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            first = torch._C._autograd._get_sequence_nr()
            self._groups.append(group)
            try:
                return function(*args, **kwargs)
            finally:
                self._groups.pop()
                numbers = range(first, torch._C._autograd._get_sequence_nr())
                self._regions.append((numbers, group))

        setattr(owner, name, counted)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no operator."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def add(self, name: str, count: int) -> None:
        """Count bytes of the present group."""
        self.moved[self._group(), name] += count

    def add_product(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Count a matrix product."""
        group = self._group()
        for way, tensors in (("read", read), ("written", written)):
            for tensor in tensors:
                to = PRODUCTS
                if self._is_gradient(tensor):
                    to = ACCUMULATION
                elif way == "written" and self._is_logits(tensor):
                    to = group
                self.moved[to, f"{name}, {way}"] += memory(tensor)

    def _group(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None:
            return self._groups[-1]
        number = node._sequence_nr()
        return next((group for numbers, group in self._regions if number in numbers), OTHER)

    def _is_gradient(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._gradients

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._is_paused or func.namespace != "aten" or func.is_view or name in _MOVING_NOTHING:
            return result
        read, written = _operands(func, args, kwargs or {})
        read, written = _rows(read, written or _tensors(result))
        if name in _PRODUCTS:
            self.add_product(name, read, written)
        else:
            self._add_operator(name, read, written)
        return result

    def _add_operator(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        if name in _GATHERING:
            read = [*written, *read[1:]]
        group = self._group()
        if group == OTHER and any(map(self._is_gradient, written)):
            group = ACCUMULATION
        elif group == LOGITS and not any(map(self._is_logits, (*read, *written))):
            group = ROWS
        self.moved[group, name] += memory(*read) + memory(*written)


def _operands(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and those of its arguments that it writes."""
    name = func.overloadpacket.__name__
    values = iter(args)
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument in func._schema.arguments:
        value = kwargs.get(argument.name) if argument.kwarg_only else next(values, None)
        tensors = _tensors(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            is_written = False  # fused Adam writes gradients to scale them, and else never
        written += tensors if is_written else []
        if not is_written or not (argument.is_out or name in _OVERWRITING):
            read += tensors
    return read, written


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _rows(read: list[Tensor], written: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is touched where an operand is sparse: its rows of all."""
    counts = [tensor._nnz() for tensor in (*read, *written) if tensor.is_sparse]
    if not counts:
        return read, written
    dense = ([t._values() if t.is_sparse else t for t in tensors] for tensors in (read, written))
    of_read, of_written = ([t[: max(counts)] for t in tensors] for tensors in dense)
    return of_read, of_written


class OneOperator(torch.autograd.Function):
    """Counts a function as one operator of so many bytes, whatever runs inside."""

    @staticmethod
    @override
    def forward(ctx: Any, counter: MovedBytes, function: Any, sizes: Any, *given: Tensor) -> Tensor:
        """Return the function's result; ``sizes`` are the bytes of both passes."""
        counter.add(function.__name__, sizes[0])
        ctx.counter, ctx.function, ctx.size = counter, function, sizes[1]
        ctx.save_for_backward(*given)
        with counter.paused():
            return function(*given)  # type: ignore[no-any-return]  # given as any function

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counter.add(ctx.function.__name__, ctx.size)
        with ctx.counter.paused(), torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return None, None, None, *torch.autograd.grad(ctx.function(*given), given, gradient)


def count_kernels(counter: MovedBytes) -> None:
    """Count the loads and stores of kernels that Triton interprets in this process."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    running: list[str] = []
    execute = GridExecutor.__call__

    def executed(grid: Any, *args: object, **kwargs: object) -> None:  # noqa: ANN401 untyped
        running.append(grid.fn.__name__)
        try:
            with counter.paused():  # it copies what a GPU would not
                execute(grid, *args, **kwargs)
        finally:
            running.pop()

    def counted(name: str, *, pointers_at: int, mask_at: int, times: int = 1) -> None:
        access = getattr(InterpreterBuilder, name)

        def counting(builder: object, *args: Any) -> object:  # noqa: ANN401 untyped
            pointers, mask = args[pointers_at], args[mask_at].data
            addresses = np.unique(pointers.data[np.broadcast_to(mask, pointers.data.shape)])
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            counter.add(f"{running[-1]}, {name}", times * size * addresses.size)
            return access(builder, *args)

        setattr(InterpreterBuilder, name, counting)

    GridExecutor.__call__ = executed
    counted("create_masked_load", pointers_at=0, mask_at=1)
    counted("create_masked_store", pointers_at=0, mask_at=2)
    counted("create_atomic_rmw", pointers_at=1, mask_at=3, times=2)
