"""One rank of a learner that counts what ranks send each other, and what the host reads for it.

Stages exchange tensors with the manners of NCCL: messages that wait for each other hang.

Usage: exchanges MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
Writes WORK_FOLDER/RANK.json: lengths of each microbatch's sequences, and by part of a step the
messages, rows of layers, exchanges of attention and reads; fields of Megatron's configuration on a
GPU and here.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.learner.batches.packing import pack
from slipstream.learner.batches.plan import MinibatchPlan
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.learner.training.step import train_step
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks import nccl_messages
from tests.support.ranks.host_reads import counting, of_updates
from tests.support.ranks.policy import algorithms, published, random_outcomes, train_sequences
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

PARTS = ((0, 4), (1, 2), (3,))  # sequences of each microbatch, of unlike lengths


class Messages:
    """Messages of this rank between stages, and its exchanges with all ranks of a group.

    NCCL makes a communicator for each group and pair that messages pass alone.
    """

    def __init__(self) -> None:
        self.pairs: set[tuple[str, int]] = set()
        self.seen: defaultdict[str, list[list[int]]] = defaultdict(list)
        for name in ("isend", "irecv", "send", "recv", "batch_isend_irecv", "all_to_all_single"):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            first = arguments[0] if arguments else named["tensor"]
            is_whole = isinstance(first, Tensor) and not first.is_floating_point()
            shape = list(first.shape) if isinstance(first, Tensor) else []
            if name in {"isend", "irecv"}:
                peer = named.get("dst", named.get("src", -1))
                self.pairs.add((named["group"].group_name, peer))
            self.seen[f"{name} of no floats" if is_whole else name].append(shape)
            return original(*arguments, **named)

        return counted


def fields_by_device(policy: Any, settings: Any) -> list[str]:  # noqa: ANN401
    """Return the fields of Megatron's configuration that differ between a GPU and a CPU."""
    from slipstream.learner.model.gpt import transformer_config

    given = policy.model.hf_config, {}, settings.learner, "run.model"
    (hf, *others) = given
    here = transformer_config(hf, torch.float32, *others, on_cpu=True)
    there = transformer_config(hf, torch.bfloat16, *others, on_cpu=False)
    names = [field.name for field in dataclasses.fields(here)]
    assert len(names) > 100
    return sorted(name for name in names if repr(getattr(here, name)) != repr(getattr(there, name)))


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    learner = section_of(layout, lr=1e-2, dtype="float32")
    device.prepare()  # has functions of torch's own in their places
    of_torch = dist.isend, dist.irecv
    nccl_messages.install()
    messages = Messages()
    topology = join_ranks(work, rank, world_size, learner)
    opened = set(messages.pairs)
    from slipstream.learner.model.weights.hf_weights import save_hf_folder
    from slipstream.learner.starting_policy import build_policy

    everything = train_sequences()[:5]
    batches = [pack([everything[i] for i in part], device.device()) for part in PARTS]
    settings = settings_of(folder, learner, algorithms(folder)["critic"])
    algorithm = algorithm_of(settings)
    policy = build_policy(settings, algorithm, topology)
    assert policy.reference is not None
    assert policy.critic is not None
    parts: dict[str, Any] = {}
    rows: list[int] = []
    for _, layer in policy.model.numbered_layers():
        layer.register_forward_pre_hook(
            lambda _, given, named: rows.append(len(given[0] if given else named["hidden_states"])),
            with_kwargs=True,
        )

    @contextmanager
    def part(name: str) -> Iterator[None]:
        messages.seen.clear()
        rows.clear()
        reads: Counter[str] = Counter()
        with counting(reads, Counter(), Counter()):
            yield
        parts[name] = {**messages.seen, "rows": list(rows), "reads": of_updates(reads)}

    with part("policy"):
        policy.proximal(batches)
    with part("reference"):
        policy.reference.logprobs(batches)
    with part("critic"):
        policy.critic.values(batches)
    plan = MinibatchPlan((PARTS,))
    with part("step"):
        train_step(policy, [batches], [plan], random_outcomes(everything), algorithm, PhaseClock())
    assert messages.pairs == opened, "a communicator of a pair was not there before the first step"
    dist.isend, dist.irecv = of_torch  # a batch takes no others
    messages.seen.clear()
    policy.bring_weights()
    save_hf_folder(policy.model, work / "exported", folder)
    exports = len(messages.seen.pop("batch_isend_irecv", []))
    unlike = published(policy, topology, work / "exported", in_parts=False)
    report = {
        "exports": exports,
        "publish": dict(messages.seen),
        "not as exported": unlike,
        "lengths": [batch.lengths for batch in batches],
        "parts": parts,
        "unlike": fields_by_device(policy, settings),
    }
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
