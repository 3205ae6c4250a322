"""One rank of a learner that records the outputs of its layers for given tokens.

Usage: python -m slipstream.learner.tools.align SETTINGS.toml FOLDER RANK [section.key=value ...]
All ranks meet in FOLDER, read FOLDER/tokens.json and write FOLDER/learner.RANK.npz; of a model with
quantized weights also what the others compute with, FOLDER/dequantized. Started by
`slipstream align`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.learner.batches.packing import TrainTrajectory, pack
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model import device
from slipstream.learner.tools.command_ranks import main, topology_of
from slipstream.wire.models.alignment import DEQUANTIZED, LOGPROBS, TOKENS, point, rows_of

if TYPE_CHECKING:
    from slipstream.learner.model.attention import PackedLayout
    from slipstream.learner.model.rank_model import RankModel
    from slipstream.learner.model.topology import Topology


class LayerRecorder:
    """Records outputs of this rank's layers, with their tokens."""

    def __init__(self, model: "RankModel", topology: "Topology", num_tokens: int) -> None:
        """Watch the layers of a model while it computes a microbatch of ``num_tokens``."""
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._num_tokens = num_tokens
        self._rank = topology.tensor_parallel_rank
        self._ranks: int = model.config.tensor_model_parallel_size
        self._divides_tokens: bool = model.config.sequence_parallel
        self._rows = torch.empty(0)
        for number, layer in model.numbered_layers():
            layer.register_forward_pre_hook(self._begin, with_kwargs=True)
            parts = {"attention": "self_attention", "mlp": "mlp", "experts": "mlp.router"}
            modules = dict(layer.named_modules())
            for part, name in parts.items():
                if name not in modules:
                    continue
                module = modules[name]
                module.register_forward_hook(self._recording(point(number, part), part))

    def _begin(
        self, _layer: torch.nn.Module, _arguments: object, named: dict[str, "PackedLayout"]
    ) -> None:
        """Find this rank's tokens."""
        split = named["packed_seq_params"].split
        whole = dataclasses.replace(split, count=split.padded)
        rows = whole.mine(torch.arange(split.padded))
        if self._divides_tokens:
            rows = rows.chunk(self._ranks)[self._rank]
        # A microbatch of padding alone is not compared.
        self._rows = rows if split.count == self._num_tokens else rows[:0]

    def _recording(self, name: str, part: str) -> Callable[[object, object, Any], None]:
        def record(_module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401
            if not len(self._rows):
                return
            tensor: Tensor = output[1] if part == "experts" else output[0]
            if part == "experts":
                tensor = tensor.sort(dim=-1).values
            elif output[1] is not None:  # a bias, which Megatron adds with the residual
                tensor = tensor + output[1]
            tensor = tensor.reshape(len(self._rows), -1)
            is_real = self._rows < self._num_tokens
            self.arrays[name] = tensor.detach().float().cpu()[is_real].numpy()
            self.arrays[rows_of(name)] = self._rows[is_real].numpy()

        return record


def record(settings: LearnerSettings, folder: Path, rank: int) -> None:
    """Compute the tokens on all ranks, and record this rank's part."""
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import load_model
    from slipstream.learner.training.policy import ReferencePolicy

    sequences = msgspec.json.decode((folder / TOKENS).read_bytes(), type=list[list[int]])
    batch = pack([_trained(tokens) for tokens in sequences], device.device())
    with topology_of(settings, folder, rank) as topology:
        model = load_model(settings.learner, settings.model)
        if model.hf_config.quantization_config is not None:
            save_hf_folder(model, folder / DEQUANTIZED, settings.model)
        recorder = LayerRecorder(model, topology, sum(map(len, sequences)))
        (logprobs,) = ReferencePolicy(model, topology).logprobs([batch])
        arrays: dict[str, Any] = dict(recorder.arrays)
        arrays[LOGPROBS] = logprobs.float().cpu().numpy()[:, None]
        np.savez(folder / f"learner.{rank}.npz", **arrays)


def _trained(tokens: Sequence[int]) -> TrainTrajectory:
    return TrainTrajectory(
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.arange(len(tokens)) > 0,
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        temperature=1.0,
    )


if __name__ == "__main__":
    main(record)
