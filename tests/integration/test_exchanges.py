"""What ranks send each other in a real step, counted: nothing but the tensors of the plan."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.ranks.run import outputs, reports, start_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.integration
LAYERS, HIDDEN = 4, 64
# Passes of a part, with and without gradients: a step has those of a proximal policy, a reference
# and a critic, and trains policy and critic.
PASSES = {"policy": (1, 0), "reference": (1, 0), "critic": (1, 0), "step": (3, 2)}
OF_CPU = {"slipstream.learner.model.ring_attention:_sequences"}  # a GPU's kernel takes bounds
RESULTS = "slipstream.learner.model.collectives:broadcast_frames"  # names of the last stage's
IN_PASSES = (
    "slipstream.learner.model.",
    "slipstream.learner.training.passes:",
    "slipstream.learner.training.states:",
    "megatron.",
)
# Reasons why a field of Megatron's configuration is another one on a GPU.
BY_DEVICE = {
    "params_dtype": "the type: learner.dtype is bfloat16 there, float32 on a CPU",
    "bf16": "the type",
    "pipeline_dtype": "the type, between stages",
    "autocast_dtype": "the type; nothing is cast automatically",
    "use_cpu_initialization": "the device: weights are made where they stay",
}


class Division(NamedTuple):
    """Sizes that divide a model with so many heads."""

    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    heads: int = 4
    on_a_host: int = 0  # ranks; 0: all

    @property
    def settings(self) -> dict[str, int]:
        return {
            "ranks_per_node": self.on_a_host,
            "pipeline_parallel": self.pipeline,
            "interleaved_chunks": self.chunks,
            "context_parallel": self.context,
        }

    def shares(self, lengths: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Return a context-parallel rank's tokens of each microbatch, and of those that fill up."""
        missing = -len(lengths) % (self.pipeline if self.chunks > 1 else 1)
        batches = (*lengths, *[[]] * missing)
        every = [max(sum(sequences), self.context) for sequences in batches]
        return [length // self.context + (rank < length % self.context) for length in every]

    def exchanges(self, lengths: Sequence[Sequence[int]], forward: int, whole: int) -> int:
        """Return the exchanges of a layer's attention in passes over all microbatches.

        Heads for tokens and back, in one each; between two rings once more, where a sequence lies
        on both; and so their gradients, for which keys are sent again.
        """
        if self.context == 1:
            return 0
        rings = max(1, self.context // self.heads)
        return sum(
            (2 + crosses) * forward + (4 + 3 * crosses) * whole
            for crosses in (rings > 1 and between_two_rings(sequences) for sequences in lengths)
        )


def between_two_rings(lengths: Sequence[int]) -> bool:
    """Return whether a query of one ring sees a key of another: all but a cut may part them.

    Each ring has the first and the last quarter of the tokens, or the second and the third.
    """
    count, ends = sum(lengths), list(accumulate(lengths))
    outer = (count + 1) // 2
    cuts = ((outer + 1) // 2, count - outer // 2)
    return any(cut not in ends for cut in cuts)


def shaped(rows: Iterable[int], times: int) -> Counter[tuple[int, ...]]:
    return Counter([(count, 1, HIDDEN) for count in rows] * times)


def check_stages(division: Division, rank: int, part: dict[str, Any], rows: list[int], name: str):
    """Check that a rank sent and received each tensor once, and nothing else."""
    stage, (forward, whole) = rank // division.context, PASSES[name]
    # A rank sends what its chunks compute, but for the last one of the model; back, gradients of
    # what it received.
    ahead = division.chunks - (stage == division.pipeline - 1)
    received = division.chunks - (stage == 0)
    sent = shaped(rows, ahead * (forward + whole)) + shaped(rows, received * whole)
    arrived = shaped(rows, received * (forward + whole)) + shaped(rows, ahead * whole)
    assert Counter(map(tuple, part.pop("isend", []))) == sent, name
    assert Counter(map(tuple, part.pop("irecv", []))) == arrived, name


@pytest.mark.parametrize(
    "division",
    [
        pytest.param(Division(pipeline=2, chunks=2, on_a_host=1), id="pp2-chunks2"),
        pytest.param(Division(pipeline=2, context=2), id="pp2-cp2"),
        pytest.param(Division(context=4, heads=2), id="cp4-few-heads"),
        pytest.param(
            Division(pipeline=4, context=2), id="pp4-cp2", marks=pytest.mark.slow
        ),  # stages in the middle, unlike pp2-cp2
    ],
)
def test_ranks_send_each_other_the_tensors_of_the_plan_alone(tmp_path: Path, division: Division):
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": division.heads}
    if division.heads == 2:  # keys are copied for ranks that share a head
        sizes["num_key_value_heads"] = 1
    model = write_tiny_model(tmp_path / "model", "qwen3", **sizes)
    ranks, work = division.pipeline * division.context, tmp_path / "work"
    outputs(start_ranks("support.ranks.exchanges", model, work, ranks, **division.settings))
    layers = LAYERS // division.pipeline
    # Weights of the second host are sent to the first in a publish; an export sends one by one.
    sent = {"batch_isend_irecv": [[]]} if division.on_a_host else {}
    for rank, report in enumerate(reports(work, ranks)):
        rows = division.shares(report["lengths"], rank % division.context)
        assert len(set(rows)) > 2, "microbatches of one length"
        assert report["unlike"] == sorted(BY_DEVICE)
        assert report["not as exported"] == []
        assert report["publish"] == sent, "one batch, and no message alone"
        exports = division.pipeline > 1 and rank % division.context == 0
        assert (report["exports"] > layers) == exports
        for name, part in report["parts"].items():
            check_stages(division, rank, part, rows, name)
            forward, whole = PASSES[name]
            exchanges = part.pop("all_to_all_single", [])
            expected = division.exchanges(report["lengths"], forward, whole)
            assert len(exchanges) == expected * layers, name
            computed = part.pop("rows")  # rows of the policy's layers
            if name == "policy":
                assert Counter(computed) == Counter(rows * layers), "padding is computed"
            reads = part.pop("reads").keys() - OF_CPU
            assert part == {}, "messages of other kinds, or of no floats"
            if name == "step":  # its outcomes are on the host
                reads = {caller for caller in reads - {RESULTS} if caller.startswith(IN_PASSES)}
            assert reads == set(), "the host waits for the device between passes"
