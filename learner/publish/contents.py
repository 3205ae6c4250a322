"""Contents of a version: the whole model's weights, or only the adapters of its layers."""

from collections.abc import Iterator

from typing_extensions import override

from slipstream.learner.model.adapters.lora import peft_parameters
from slipstream.learner.model.adapters.peft import adapters_of
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.weights.gathering import held_shards, parameter_of, with_adapter
from slipstream.learner.model.weights.hf_weights import hf_specs
from slipstream.learner.model.weights.shards import Shard
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.models.adapters import adapter_shapes, is_target
from slipstream.wire.models.families.tables import Parameter
from slipstream.wire.models.fp8 import quantized


class Contents:
    """The tensors of a version, and this rank's parts of them: all weights, adapters merged in."""

    in_parts = True  # every host of the learner may keep some of the tensors

    def __init__(self, model: RankModel, *, is_fp8: bool = False) -> None:
        self._model, self._is_fp8 = model, is_fp8

    def specs(self) -> list[TensorSpec]:
        """Return all tensors."""
        specs = hf_specs(self._model)
        return list(quantized(specs)) if self._is_fp8 else specs

    def held(self) -> Iterator[tuple[str, Shard]]:
        """Yield the parts that this rank could write, by their names in the whole model."""
        yield from held_shards(self._model)

    def parameter(self, name: str) -> Parameter:
        """Return the tensors of the part of this name, on any rank."""
        return parameter_of(self._model, name)

    def current(self, name: str, shard: Shard) -> Shard:
        """Return a part of this rank as it must be written now."""
        return with_adapter(self._model, name, shard)


class AdaptersAlone(Contents):
    """A and B of every adapter, by PEFT's names; these few bytes are kept on the first host."""

    in_parts = False

    def __init__(self, model: RankModel) -> None:
        super().__init__(model)
        self._adapters = adapters_of(model)
        facts = self._adapters.facts
        self._parameters = {
            parameter.names[0]: parameter
            for _, weight in model.hf_config.parameters()
            for tensor in weight.tensors
            if is_target(tensor.name, facts.targets)
            for parameter in peft_parameters(tensor, facts)
        }

    @override
    def specs(self) -> list[TensorSpec]:
        """Return all A and B, in the model's type."""
        shapes = adapter_shapes(self._model.hf_config.tensor_shapes, self._adapters.facts)
        dtype = str(self._model.config.params_dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]

    @override
    def held(self) -> Iterator[tuple[str, Shard]]:
        yield from self._adapters.owned()

    @override
    def parameter(self, name: str) -> Parameter:
        return self._parameters[name]

    @override
    def current(self, name: str, shard: Shard) -> Shard:
        """Return the part: it is the parameter itself."""
        return shard
