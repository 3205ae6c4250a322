"""A replica's part of a step: payloads, sent from one rank to all ranks of the replica."""

import logging
from collections.abc import Sequence

from slipstream.learner.batches.links import RankLink
from slipstream.learner.batches.orders import Rejection, StepPlan, groups_of
from slipstream.learner.batches.packing import ExpertSizes, TrainTrajectory, bars_other_ends, unpack
from slipstream.learner.model.collectives import any_rank, broadcast_frames, union
from slipstream.learner.model.topology import Topology
from slipstream.wire.errors import PeerLostError, ProtocolError, SlipstreamError
from slipstream.wire.messages.codec import Frame, decode_payload
from slipstream.wire.messages.trajectory import MAX_TOKENS

_log = logging.getLogger(__name__)


def fetch_payloads(order: StepPlan, topology: Topology, link: RankLink | None) -> list[Frame]:
    """Return the payloads of this rank's replica, in the order of ``wanted``; all ranks call this.

    One rank of the replica has a link and fetches them for all.

    Raises:
        SlipstreamError: on every rank, if any rank could not fetch its payloads.
    """
    keys = order.keys(topology.data_parallel_rank)
    frames: list[Frame] | None = None
    failure: SlipstreamError | None = None
    if link is not None:
        try:
            frames = link.fetch(order.step, keys)
        except SlipstreamError as error:
            _log.exception("step %d is abandoned: its payloads cannot be fetched", order.step)
            failure = error
    if any_rank(failure is not None):
        raise failure or PeerLostError(
            f"step {order.step} is abandoned: another learner rank could not fetch its payloads, "
            "its log has the reason"
        )
    if topology.sizes.per_replica == 1:
        return frames if frames is not None else []
    return broadcast_frames(
        frames, len(keys), group=topology.replica_group, source=topology.replica_leader
    )


def unpack_share(
    order: StepPlan,
    topology: Topology,
    frames: Sequence[Frame],
    *,
    vocab_size: int,
    longest: int = MAX_TOKENS,
    max_turns: int = MAX_TOKENS,
    experts: ExpertSizes | None = None,
) -> dict[int, TrainTrajectory] | Rejection:
    """Return this replica's sequences by index, or the reason that no rank trains the step.

    All ranks call this with the result of ``fetch_payloads``, and either all train or none.
    """
    headers = order.headers
    sequences: dict[int, TrainTrajectory] = {}
    is_bad = bars_other_ends(headers)
    for i, frame in zip(order.wanted(topology.data_parallel_rank), frames, strict=True):
        try:
            sequences[i] = unpack(
                headers[i],
                decode_payload(frame),
                vocab_size=vocab_size,
                longest=longest,
                max_turns=max_turns,
                experts=experts,
            )
        except ProtocolError as error:
            key = (headers[i].group_id, headers[i].sibling)
            _log.warning("step %d: trajectory %d/%d is invalid: %s", order.step, *key, error)
            is_bad[i] = True
    bad = [i for i, flag in enumerate(union(is_bad)) if flag]
    if not bad:
        return sequences
    names = ", ".join(f"{headers[i].group_id}/{headers[i].sibling}" for i in bad)
    detail = f"the payloads of trajectories {names} cannot be trained, a learner's log has why"
    return Rejection("invalid", groups_of(order, bad), detail)
