"""Trajectories with random images, for models that see them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from slipstream.learner.batches.packing import KeptTokens, SeenImage, TrainTrajectory
from slipstream.wire.messages.images import ImageSpan
from slipstream.wire.models.hf_config import HfConfig

_BETWEEN = 7
# Rows and columns of the patches of each trajectory's images; an image of some size is one image,
# whichever shows it, and more than one window of the tiny towers.
SHOWN = [((4, 6),), (), ((2, 2), (6, 4)), (), ((6, 4),), ((2, 2),), (), ((8, 4),)]


def with_images(trajectories: list[TrainTrajectory], hf: HfConfig) -> list[TrainTrajectory]:
    """Return the trajectories with images after their first token; as they are for the blind."""
    if hf.vision is None:
        return trajectories
    return [
        showing(trajectory, hf, SHOWN[number % len(SHOWN)])
        for number, trajectory in enumerate(trajectories)
    ]


def showing(
    trajectory: TrainTrajectory, hf: HfConfig, grids: Sequence[tuple[int, int]]
) -> TrainTrajectory:
    """Return a trajectory that shows images of so many rows and columns after its first token.

    A token of text follows each.
    """
    assert hf.vision is not None
    merge, shown, images = hf.vision.spatial_merge_size, list[int](), list[SeenImage]()
    for rows, columns in grids:
        count = rows * columns // merge**2
        pixels = np.random.default_rng(100 * rows + columns).normal(
            size=(rows * columns, hf.vision.channels)
        )
        span = ImageSpan(f"{rows:032}{columns:032}", 1 + len(shown), count, rows, columns)
        images.append(SeenImage(span, merge, pixels.astype(np.float32)))
        shown += [hf.image_token or 0] * count + [_BETWEEN]

    def longer(values: np.ndarray | None, fill: int | list[int]) -> np.ndarray | None:
        return None if values is None else np.insert(values, [1] * len(shown), fill)

    kept, steps = trajectory.kept, trajectory.version_steps
    return dataclasses.replace(
        trajectory,
        token_ids=longer(trajectory.token_ids, shown),
        loss_mask=longer(trajectory.loss_mask, 0),
        behavior_logprobs=longer(trajectory.behavior_logprobs, 0),
        version_steps=longer(steps, 0 if steps is None else steps[0]),
        end_barred=longer(trajectory.end_barred, 0),
        kept=None if kept is None else KeptTokens(longer(kept.counts, 0), kept.ids),
        images=tuple(images),
    )
