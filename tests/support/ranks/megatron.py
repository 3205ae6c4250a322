"""One rank of a learner that does one forward and backward pass.

Usage: megatron MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json, and the model as it exports it to WORK_FOLDER/exported.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algos.logprobs.linear_logprobs import linear_logprobs
from slipstream.algos.logprobs.sampling import OutputLayer
from tests.support.published_parts import memory_of, written_tensors
from tests.support.ranks.program import finish, join_ranks, run
from tests.support.ranks.run import section_of
from tests.support.tiny_models import sequences


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from slipstream.learner.model.gpt import build_model
    from slipstream.learner.model.weights.hf_weights import (
        export_hf_weights,
        load_hf_weights,
        save_hf_folder,
    )
    from slipstream.wire.models.hf_config import load_hf_config

    # Under sequence parallelism Megatron's finalization sums gradients of norms, and is not here.
    learner = section_of(layout, sequence_parallel=False)
    model = build_model(load_hf_config(folder), dtype=torch.float32, extra={}, learner=learner)
    load_hf_weights(model, folder)
    logprobs, entropies = forward_backward(model, topology)
    original = load_file(folder / "model.safetensors")
    exported = [(name, torch.equal(t, original[name])) for name, t in export_hf_weights(model)]
    save_hf_folder(model, work / "exported", folder)
    written, refused, writes = published(model, topology, original)
    norm = gradient_norm(model, topology)
    report = {
        "data_parallel": topology.data_parallel,
        "logprobs": logprobs,
        "entropies": entropies,
        "gradient_norm": norm,
        "exported": sorted(name for name, is_equal in exported if is_equal),
        "num_exported": len(exported),
        "original": sorted(original),
        "written": written,
        "refused": refused,
        "writes": writes,
        "kernels": kernels_of_many_sequences(model),
    }
    finish(work / f"{rank}.json", report)


def forward_backward(model, topology):  # noqa: ANN001 - known only after prepare()
    """Return logprobs and entropies by sequence number; leave the gradients in the model."""
    from slipstream.learner.model.gpt import output_weight
    from tests.support.logits import packed_forward

    numbers = range(topology.data_parallel_rank, len(sequences()), topology.data_parallel)
    mine = [torch.tensor(sequences()[i]) for i in numbers]
    lengths = [len(sequence) for sequence in mine]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = packed_forward(model, torch.cat(mine), positions, cu_seqlens, lengths)
    targets = torch.cat([sequence.roll(-1) for sequence in mine])
    layer = OutputLayer(
        weight=output_weight(model),
        group=topology.tensor_group,
        vocab_size=model.hf_config.vocab_size,
    )
    logprobs, entropy, _ = linear_logprobs(hidden, layer, targets)
    weights = torch.cat([torch.linspace(-1, 2, n) for n in lengths])
    (-(logprobs * weights).sum() - 0.01 * entropy.sum()).backward()
    return tuple(
        {i: part[:-1].tolist() for i, part in zip(numbers, values.split(lengths), strict=True)}
        for values in (logprobs, entropy)
    )


class Kernels(TorchDispatchMode):
    """Counts operators that compute, views left out."""

    _VIEWS = (
        *("view", "slice", "split", "squeeze", "expand", "transpose", "alias", "detach", "select"),
        *("aten.t.", "as_strided", "narrow", "chunk", "reshape", "permute"),
    )
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # noqa: ANN001
        self.count += not any(view in str(func) for view in self._VIEWS)
        return func(*args, **(kwargs or {}))


def kernels_of_many_sequences(model) -> list[int]:  # noqa: ANN001 - known only after prepare()
    """Return how many kernels 48 sequences of six lengths launch, forward and backward."""
    from tests.support.logits import packed_forward

    lengths = [5, 1, 17, 9, 30, 2] * 8
    token_ids = torch.arange(sum(lengths)) % 100
    positions = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with Kernels() as forward:
        hidden = packed_forward(model, token_ids, positions, bounds, lengths)
    with Kernels() as backward:
        hidden.sum().backward()
    return [forward.count, backward.count]


def published(model, topology, original):  # noqa: ANN001 - known only after prepare()
    """Return what is right in the memory that all ranks wrote, and what a rank then refuses."""
    from slipstream.learner.publish.weight_writer import WeightWriter

    writer = WeightWriter(model, topology, bucket_bytes=4096)
    bad = writer.write(1)
    assert not bad, bad
    dist.barrier()
    memory, views = memory_of(writer, 0), written_tensors(writer, 1)
    right = sorted(name for name, view in views.items() if torch.equal(view, original[name]))
    untouched = int(memory.slot(0).sum()) + int(memory.slot(2).sum())
    assert untouched == 0
    dist.barrier()
    if topology.rank == topology.world_size - 1:
        with torch.no_grad():
            last = model.chunks[-1].decoder.layers[-1]
            last.self_attention.linear_proj.weight[0, 0] = float("nan")
    return right, writer.write(0), [piece.name for piece in writer.writes]


def gradient_norm(model, topology):  # noqa: ANN001 - known only after prepare()
    """Return the norm of the whole model's gradient, summed over data parallelism."""
    split, replicated = torch.zeros(()), torch.zeros(())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=topology.data_group)
        square = parameter.grad.square().sum()
        if parameter.tensor_model_parallel:
            split += square
        else:
            replicated += square
    dist.all_reduce(split, group=topology.tensor_group)
    return (split + replicated).sqrt().item()


if __name__ == "__main__":
    run(main)
