"""Contents of a version: the whole model's weights, or only the adapters of its layers."""

from collections.abc import Iterator
from typing import Protocol

from slipstream.learner.model.gathering import held_shards, parameter_of, with_adapter
from slipstream.learner.model.hf_tensors import hf_shapes
from slipstream.learner.model.hf_weights import hf_specs
from slipstream.learner.model.peft import adapters_of
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.shards import Shard
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.adapters import adapter_shapes
from slipstream.wire.models.families.tables import HfTensor, Parameter


class Contents(Protocol):
    """The tensors of a version, and this rank's parts of them."""

    in_parts: bool  # True if every host of the learner may keep some of the tensors

    def specs(self) -> list[TensorSpec]:
        """Return all tensors."""
        ...

    def held(self) -> Iterator[tuple[str, Shard]]:
        """Yield the parts that this rank could write, by their own names."""
        ...

    def parameter(self, name: str) -> Parameter:
        """Return the tensors of the part of this name, on any rank."""
        ...

    def current(self, name: str, shard: Shard) -> Shard:
        """Return a part of this rank as it must be written now."""
        ...


class WholeModel:
    """All weights, with adapters merged in."""

    in_parts = True

    def __init__(self, model: RankModel) -> None:
        self._model = model

    def specs(self) -> list[TensorSpec]:
        """Return the Hugging Face tensors."""
        return hf_specs(self._model)

    def held(self) -> Iterator[tuple[str, Shard]]:
        """Yield parameters, by Megatron's names in the whole model."""
        yield from held_shards(self._model)

    def parameter(self, name: str) -> Parameter:
        """Return the Hugging Face tensors of a parameter."""
        return parameter_of(self._model, name)

    def current(self, name: str, shard: Shard) -> Shard:
        """Return a part with its adapter's addition."""
        return with_adapter(self._model, name, shard)


class AdaptersAlone:
    """A and B of every adapter, by PEFT's names; these few bytes are kept on the first host."""

    in_parts = False

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._adapters = adapters_of(model)

    def specs(self) -> list[TensorSpec]:
        """Return all A and B, in the model's type."""
        shapes = adapter_shapes(hf_shapes(self._model.hf_config), self._adapters.facts)
        dtype = str(self._model.config.params_dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]

    def held(self) -> Iterator[tuple[str, Shard]]:
        """Yield the parts that this rank owns."""
        yield from self._adapters.owned()

    def parameter(self, name: str) -> Parameter:
        """Return the tensor of this name."""
        return one_tensor(name)

    def current(self, name: str, shard: Shard) -> Shard:  # noqa: ARG002
        """Return the part: it is the parameter itself."""
        return shard


def one_tensor(name: str) -> Parameter:
    """Return a parameter that is a single unchanged tensor."""
    return Parameter("copy", (HfTensor(name, ()),))
