"""One model of a tenant on this rank: a set of adapters, its optimizer, gradients that wait.

Its durable state is one file for all ranks and any layout: whole tensors under PEFT's names, with
the number of the last command that they hold and that command's outcome.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load, save
from torch import Tensor

from slipstream.learner.commands.adam import Moments, update
from slipstream.learner.model.adapters.additions import LayerShare
from slipstream.learner.model.adapters.lora import LoraAdapters, add_adapters
from slipstream.learner.model.adapters.peft import adapters_of
from slipstream.learner.model.collectives import gather_bytes
from slipstream.learner.model.rank_model import RankModel
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.commands import LoraSpec, OptimStep, Outcome
from slipstream.wire.models.adapters import AdapterFacts

_KINDS = ("weights", "first", "second")
_FACTS = "slipstream"  # key of what a file says of itself


class StateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a state file says of itself."""

    spec: LoraSpec
    step: int  # updates of the optimizer
    applied: int = -1  # last command that it holds
    outcome: Outcome | None = None  # outcome of that command
    model: str = ""


class TenantModel:
    """A set of adapters of a frozen model, which other sets share."""

    def __init__(self, base: RankModel, spec: LoraSpec) -> None:
        """Make a model of a tenant's: A at random from the seed, B = 0."""
        self.spec = spec
        facts = AdapterFacts(rank=spec.rank, alpha=spec.alpha, targets=spec.targets)
        self._model = add_adapters(base.sharing(), facts, seed=spec.seed)
        self.adapters: LoraAdapters = adapters_of(self._model)
        self._places: list[tuple[str, LayerShare, int]] = []
        self.parameters: list[torch.nn.Parameter] = []
        for held in self.adapters.held():
            if not isinstance(held.tensor, torch.nn.Parameter):  # a part of a stack
                raise ConfigError(
                    f"[serve] trains no adapters of experts, and lora.targets gives {held.name} "
                    "one: name other layers"
                )
            self._places.append((held.name, held.place, held.dim))
            self.parameters.append(held.tensor)
        self.moments = Moments.of(self.parameters)
        self._waiting: list[Tensor] | None = None  # gradients since the last step
        self.at = -1  # last command carried out
        self.applied = -1  # last command in the durable state
        self.outcome: Outcome | None = None  # outcome of ``applied``

    def attach(self) -> None:
        """Have passes through the model's layers use these adapters."""
        self.adapters.attach()

    # ---- gradients -----------------------------------------------------------------------------

    def add_gradients(self) -> None:
        """Add the parameters' gradients, summed over all ranks that hold copies, to what waits."""
        found = [
            torch.zeros_like(weight) if p.grad is None else p.grad.float()
            for p, weight in zip(self.parameters, self.moments.weights, strict=True)
        ]
        self.forget_last_gradients()
        _summed(found, parallel_state.get_data_parallel_group(with_context_parallel=True))
        if self._model.config.sequence_parallel:
            whole = [
                gradient
                for gradient, (_, place, dim) in zip(found, self._places, strict=True)
                if place.dim != dim
            ]
            _summed(whole, parallel_state.get_tensor_model_parallel_group())
        if self._waiting is None:
            self._waiting = found
        else:
            torch._foreach_add_(self._waiting, found)

    def forget_last_gradients(self) -> None:
        """Drop the parameters' gradients: those that wait stay as they are."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, adam: OptimStep) -> float:
        """Update the adapters by what waits, which is forgotten; return the gradients' norm.

        A norm that is not finite changes nothing.
        """
        waiting = self._waiting or [torch.zeros_like(w) for w in self.moments.weights]
        self._waiting = None
        norm = self._norm(waiting)
        if norm == norm and norm != float("inf"):
            update(self.moments, waiting, norm, adam)
            self._take_weights()
        return norm

    def _norm(self, gradients: list[Tensor]) -> float:
        own = [g for g, owned in zip(gradients, self._owned(), strict=True) if owned]
        device = self.parameters[0].device if self.parameters else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in own:
            total += gradient.double().square().sum()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    def _owned(self) -> list[bool]:
        """Return for each tensor whether this rank has the first copy of its part."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return [copy == 0 and (place.dim == dim or first) for _, place, dim in self._places]

    @torch.no_grad()
    def _take_weights(self) -> None:
        for parameter, weight in zip(self.parameters, self.moments.weights, strict=True):
            parameter.copy_(weight)

    # ---- files ---------------------------------------------------------------------------------

    def facts(self, *, is_own: bool, model: str = "") -> StateFacts:
        """Return what a file is to say: of this model's own state, or of a checkpoint."""
        if not is_own:
            return StateFacts(spec=self.spec, step=self.moments.step)
        return StateFacts(
            spec=self.spec,
            step=self.moments.step,
            applied=self.applied,
            outcome=self.outcome,
            model=model,
        )

    def whole(self, kinds: tuple[str, ...] = _KINDS) -> dict[str, Tensor]:
        """Return the whole model's tensors on the host, by kind and PEFT's name; all ranks call it.

        Only rank 0 needs them, and other ranks' results are the same.
        """
        parts: dict[str, Tensor] = {}
        for (name, place, dim), owned, *tensors in zip(
            self._places,
            self._owned(),
            *(getattr(self.moments, kind) for kind in kinds),
            strict=True,
        ):
            if owned:
                for kind, tensor in zip(kinds, tensors, strict=True):
                    split = f"{dim}.{place.rank}" if place.dim == dim else "-"
                    parts[f"{kind}/{split}/{name}"] = tensor.detach().cpu().contiguous()
        joined: dict[str, dict[int, Tensor]] = {}
        dims: dict[str, int] = {}
        every = [parts] if not _several() else [load(data) for data in gather_bytes(save(parts))]
        for part in every:
            for key, tensor in part.items():
                kind, split, name = key.split("/", 2)
                dim, _, rank = split.partition(".")
                joined.setdefault(f"{kind}/{name}", {})[int(rank or 0)] = tensor
                dims[f"{kind}/{name}"] = int(dim) if rank else 0
        return {
            key: torch.cat([by_rank[rank] for rank in sorted(by_rank)], dims[key])
            if len(by_rank) > 1
            else next(iter(by_rank.values()))
            for key, by_rank in sorted(joined.items())
        }

    def state_file(self, facts: StateFacts) -> bytes:
        """Return a file of the whole state; every rank calls this."""
        said = msgspec.json.encode(facts).decode()
        return save(self.whole(), metadata={_FACTS: said})

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], facts: StateFacts, *, optimizer: bool) -> None:
        """Take this rank's part of a state file's tensors, with the optimizer if it is wanted.

        Raises:
            KeyError: a tensor is missing.
        """
        for kind in _KINDS if optimizer else _KINDS[:1]:
            for (name, place, dim), part in zip(
                self._places, getattr(self.moments, kind), strict=True
            ):
                whole = tensors[f"{kind}/{name}"]
                rows = place.share(whole.shape[dim], dim)
                part.copy_(whole[(slice(None),) * dim + (rows,)])
        if not optimizer:
            for moment in (*self.moments.first, *self.moments.second):
                moment.zero_()
        self.moments.step = facts.step if optimizer else 0
        self._waiting = None
        self._take_weights()


def read_state(data: bytes, digest: str = "") -> tuple[StateFacts, dict[str, Tensor]]:
    """Return what a state file says of itself, and its tensors.

    Raises:
        ValueError: it is no such file, or not the one of a ``digest``.
    """
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the file {digest} is damaged or gone")
    length = int.from_bytes(data[:8], "little")
    head: dict[str, Any] = msgspec.json.decode(data[8 : 8 + length])
    facts = msgspec.json.decode(head["__metadata__"][_FACTS], type=StateFacts)
    return facts, load(data)


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _summed(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group, in place and in one message."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
