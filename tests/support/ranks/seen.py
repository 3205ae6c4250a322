"""One rank of a learner that compares a model that sees images with transformers.

Usage: seen MODEL_FOLDER WORK_FOLDER RANK WORLD_SIZE LEARNER_JSON
All sequences are one pack here, and each alone there. Writes WORK_FOLDER/RANK.json: by type of the
weights the largest difference of logits, and the largest logit; and by learner.vision_lr_scale how
far a step moves a weight of the tower, and one of the language model.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.learner.batches.packing import PackedBatch, TrainTrajectory, pack
from slipstream.learner.model import device
from slipstream.wire.process.phases import PhaseClock
from tests.support.ranks.policy import algorithm, random_outcomes, train_sequences, whole_plan
from tests.support.ranks.program import finish, join_ranks, run
from tests.support.ranks.run import section_of
from tests.support.seen_images import with_images

if TYPE_CHECKING:
    from slipstream.learner.model.topology import Topology


def by_transformers(
    model: torch.nn.Module, trajectory: TrainTrajectory, image_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [T, V] and the positions [3, T] of a trajectory alone."""
    tokens = torch.from_numpy(trajectory.token_ids).long()[None]
    if not trajectory.images:
        return model(tokens).logits[0], torch.arange(tokens.size(1)).expand(3, -1)
    spans = [image.span for image in trajectory.images]
    pixels = [torch.from_numpy(image.pixels) for image in trajectory.images]
    given = {
        "mm_token_type_ids": (tokens == image_token).int(),
        "image_grid_thw": torch.tensor([[1, span.rows, span.columns] for span in spans]),
    }
    positions, _ = model.model.get_rope_index(tokens, **given)
    return model(tokens, pixel_values=torch.cat(pixels), **given).logits[0], positions[:, 0]


def moves(
    folder: Path,
    topology: "Topology",
    layout: str,
    trajectories: list[TrainTrajectory],
    scale: float,
) -> tuple[float, float]:
    """Return how far one step, in a warm-up, moves a weight of the tower and one of the model.

    With such an epsilon Adam is linear in the gradient.
    """
    from slipstream.learner.model.weights.hf_weights import export_hf_weights
    from slipstream.learner.starting_policy import load_model
    from slipstream.learner.training.policy import Policy
    from slipstream.learner.training.step import train_step

    learner = section_of(
        layout,
        vision="trained",
        vision_lr_scale=scale,
        lr=10.0,
        lr_warmup_steps=1,
        adam_epsilon=1e3,
        clip_grad=0.0,
    )
    policy = Policy(load_model(learner, folder), learner, topology)
    names = "visual.blocks.0.attn.proj.weight", "model.layers.0.mlp.down_proj.weight"
    weights = []
    for _ in range(2):
        found = dict(export_hf_weights(policy.model))
        weights.append([found[name].clone() for name in names])
        batch, plan = pack(trajectories, device.device()), whole_plan(trajectories)
        outcomes = random_outcomes(trajectories)
        train_step(policy, [[batch]], [plan], outcomes, algorithm(), PhaseClock())
    tower, text = (float((after - before).norm()) for before, after in zip(*weights, strict=True))
    return tower, text


def main(folder: Path, work: Path, rank: int, world_size: int, layout: str) -> None:
    topology = join_ranks(work, rank, world_size, section_of(layout))
    from transformers import AutoModelForImageTextToText

    from slipstream.learner.starting_policy import load_model
    from slipstream.wire.models.hf_config import load_hf_config
    from tests.support.logits import packed_logits

    hf = load_hf_config(folder)
    assert hf.image_token is not None
    trajectories = with_images(train_sequences(), hf)
    batch: PackedBatch = pack(trajectories, device.device())
    assert batch.images is not None
    report: dict[str, tuple[float, float]] = {}
    with torch.no_grad():
        for dtype in ("float32", "bfloat16"):
            ours = load_model(section_of(layout, dtype=dtype), folder)
            logits = packed_logits(
                ours,
                batch.token_ids,
                batch.position_ids,
                batch.cu_seqlens,
                batch.lengths,
                batch.images,
            )
            theirs = AutoModelForImageTextToText.from_pretrained(
                folder, dtype=getattr(torch, dtype)
            )
            alone = [by_transformers(theirs, each, hf.image_token) for each in trajectories]
            expected = torch.cat([logits for logits, _ in alone])
            positions = torch.cat([positions for _, positions in alone], dim=1)
            assert batch.images.position_ids.equal(positions)
            difference = (logits.float() - expected.float()).abs().max()
            report[dtype] = float(difference), float(expected.abs().max())
    for scale in (1.0, 0.25):
        report[str(scale)] = moves(folder, topology, layout, trajectories, scale)
    finish(work / f"{rank}.json", report)


if __name__ == "__main__":
    run(main)
