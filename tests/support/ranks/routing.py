"""One rank of a learner whose routers choose an engine's experts again, or their own.

Usage: routing MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON SUBMISSIONS_FILE
Writes to WORK_FOLDER/RANK.json, with replay and without, the log-probabilities of responses, and
how often a token had other experts in a layer than the engine gave it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.learner.batches.packing import pack, unpack
from slipstream.learner.model import device
from slipstream.learner.training.algorithm import algorithm_of
from slipstream.wire.settings.sections import RoutingReplay
from tests.support.ranks.decisions import read_submissions
from tests.support.ranks.program import finish, join_ranks, run, settings_of
from tests.support.ranks.run import section_of

if TYPE_CHECKING:
    from slipstream.learner.model.rank_model import RankModel

REPLAYS: tuple[RoutingReplay, ...] = ("off", "R3")


def recorded_maps(model: "RankModel") -> list[Tensor]:
    """Return a list that gets, [T', E] bool, which experts each layer's router has chosen."""
    maps: list[Tensor] = []
    count = model.hf_config.num_routed_experts

    def record(_router: torch.nn.Module, _given: object, made: tuple[Tensor, Tensor]) -> None:
        chosen = made[1]
        maps.append(torch.zeros(len(chosen), count).bool().scatter(-1, chosen, True))

    for chunk in model.chunks:
        for layer in chunk.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.register_forward_hook(record)
    return maps


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str, file: Path) -> None:
    learner = section_of(layout)
    topology = join_ranks(work, rank, world_size, learner)
    from slipstream.learner.starting_policy import build_policy
    from slipstream.learner.training.batch import expert_sizes

    cases = read_submissions(file)
    report: dict[str, dict[str, object]] = {name: {} for name in cases}
    for replay in REPLAYS:
        settings = settings_of(folder, learner, {}, replay=replay)
        policy = build_policy(settings, algorithm_of(settings), topology)
        hf = policy.model.hf_config
        maps = recorded_maps(policy.model)
        for name, pairs in cases.items():
            maps.clear()
            sequences = [
                unpack(*pair, vocab_size=hf.vocab_size, experts=expert_sizes(hf)) for pair in pairs
            ]
            batch = pack(sequences, device.device())
            (outputs,) = policy.proximal([batch])
            assert batch.experts is not None
            assert len(maps) == batch.experts.size(1)
            known = (batch.experts >= 0).all(-1).all(-1)
            engine = torch.zeros(*batch.experts.shape[:2], hf.num_routed_experts).bool()
            engine = engine.scatter(-1, batch.experts.clamp(min=0).long(), True)
            chosen = torch.stack(maps, dim=1)[: len(known)]
            report[name][replay] = {
                "logprobs": outputs.logprobs[batch.loss_mask].tolist(),
                "engine": batch.behavior_logprobs[batch.loss_mask].tolist(),
                "other": int((chosen != engine).any(-1)[known].sum()),
                "other tokens": int((chosen != engine).any(-1).any(-1)[known].sum()),
                "tokens": int(known.sum()),
                "all": int(known.sum()) * batch.experts.size(1),
                "each has": sorted(set(chosen.sum(-1).flatten().tolist())),
            }
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
