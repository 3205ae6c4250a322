"""Reads checkpoints, all ranks together, with Megatron's distributed checkpointing."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.learner.checkpoints import random_numbers
from slipstream.learner.checkpoints.digests import damage_of
from slipstream.learner.checkpoints.files import random_state
from slipstream.learner.checkpoints.identity import dtype_name, is_of_layout, refuse_other_model
from slipstream.learner.checkpoints.optimizer_resharding import load_resharded
from slipstream.learner.checkpoints.rank_agreement import reason_of
from slipstream.learner.model.collectives import any_rank
from slipstream.learner.model.rank_model import RankModel
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import CheckpointInfo

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class DamagedCheckpointError(ConfigError):
    """A checkpoint cannot be read: a part is missing or cut off."""


def load_checkpoint(policy: Policy, topology: Topology, folder: Path, info: CheckpointInfo) -> None:
    """Fill model, optimizer, schedule and random numbers from a checkpoint; every rank calls this.

    The checkpoint may have other parallel sizes, and an optimizer divided or not. Random numbers
    are restored if the sizes are equal; otherwise they stay as seeded.

    Raises:
        ConfigError: the checkpoint is of another model.
        DamagedCheckpointError: on every rank, if any of them cannot read it.
    """
    refuse_other_model(policy.model, folder, info)
    if policy.critic is not None and not info.has_critic:
        raise ConfigError(
            f"{folder} holds no critic, and algo.advantage needs one: resume with the algorithm "
            "that wrote it, or export it and start a run from it (run.model)"
        )
    same = is_of_layout(info, topology.world_size, topology.sizes)
    wanted = policy.sharded_state(is_loading=True, has_reference=info.has_reference)
    if info.has_reference and not policy.renews_reference:
        _log.warning(
            "%s holds a renewed reference policy, and algo.kl.renew_every is 0: it is the one of "
            "algo.kl.reference again",
            folder.name,
        )
    if policy.renews_reference and not info.has_reference:
        _log.info("%s holds no reference policy: it starts as algo.kl.reference", folder.name)
    if same:
        wanted["rng"] = random_state(topology)
    _on_all(lambda: _refuse_damaged(folder) if topology.rank == 0 else None, folder)
    if info.has_divided_optimizer and not info.has_places:
        _log.warning(
            "%s was written by a version that misplaced the optimizer of policies with over 40 "
            "million parameters where learner.distributed_optimizer and "
            "learner.overlap_grad_reduce were set, or with tied embeddings and pipelines: in "
            "these cases export it, and start from run.model",
            folder.name,
        )
    if info.has_divided_optimizer == policy.divides_optimizer:
        state = _on_all(lambda: _load(wanted, folder), folder)
    else:
        state = load_resharded(
            wanted,
            lambda part: _on_all(lambda: _load(part, folder), folder),
            has_float32=dtype_name(policy.model) == "float32",
        )
    policy.load_state(state)
    if same:
        if not random_numbers.restore(state["rng"], torch.cuda, get_cuda_rng_tracker().set_states):
            _log.info(
                "%s was written on another kind of device: its random numbers start over",
                folder.name,
            )
    else:
        _log.info(
            "%s was written by %d ranks in another layout (%s): random numbers start over",
            folder.name,
            info.ranks,
            {"tensor": info.tensor_parallel, **info.parallel},
        )


def load_weights(model: RankModel, folder: Path, info: CheckpointInfo) -> None:
    """Fill a model alone from a checkpoint of any layout.

    Raises:
        ConfigError: the checkpoint is of another model.
        DamagedCheckpointError: it cannot be read.
    """
    refuse_other_model(model, folder, info)
    _refuse_damaged(folder)
    state = _load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(state["model"])


def _refuse_damaged(folder: Path) -> None:
    if damage := damage_of(folder):
        raise DamagedCheckpointError(f"cannot read the checkpoint {folder}: {damage}")


def _on_all(read: Callable[[], Result], folder: Path) -> Result:
    """Return what this rank reads, once all ranks have read.

    Raises:
        DamagedCheckpointError: on every rank, if any of them failed.
    """
    result: Result | None = None
    failure: DamagedCheckpointError | None = None
    try:
        result = read()
    except DamagedCheckpointError as error:
        failure = error
    if any_rank(failure is not None):
        raise failure or DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: another learner rank failed"
        )
    return cast("Result", result)


def _load(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    if not (folder / COMMON_STATE_FNAME).is_file():  # Megatron's own error is hard to read
        raise DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: no {COMMON_STATE_FNAME}"
        )
    try:
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (Exception, CheckpointException) as error:  # any error of a damaged file
        raise DamagedCheckpointError(
            f"cannot read the checkpoint {folder}: {reason_of(error)}"
        ) from error
    return state
