"""A replica's part of a step: payloads, sent from one rank to all ranks of the replica."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from slipstream.learner.batches.images import ImageReader, seen_images
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


def fetch_images(
    frames: Sequence[Frame], topology: Topology, link: RankLink | None
) -> dict[str, bytes]:
    """Return the files of the images that payloads show, by digest; all ranks call this.

    Those that cannot be had are empty. One rank of the replica has a link.

    Raises:
        SlipstreamError: on every rank, if any rank could not ask for its images.
    """
    digests = sorted({digest for frame in frames for digest in _shown(frame)})
    contents: list[Frame] | None = None
    failure: SlipstreamError | None = None
    if link is not None:
        try:
            found = link.fetch_images(digests)
            contents = [found.get(digest, b"") for digest in digests]
        except SlipstreamError as error:
            _log.exception("the step is abandoned: its images cannot be fetched")
            failure = error
    if any_rank(failure is not None):
        raise failure or PeerLostError(
            "the step is abandoned: another learner rank could not fetch its images, its log has "
            "the reason"
        )
    if topology.sizes.per_replica > 1:
        contents = broadcast_frames(
            contents, len(digests), group=topology.replica_group, source=topology.replica_leader
        )
    return dict(zip(digests, map(bytes, contents or ()), strict=True))


def _shown(frame: Frame) -> list[str]:
    """Return the digests of a payload's images; none if it cannot be read, refused later."""
    try:
        return [span.digest for span in decode_payload(frame).images]
    except ProtocolError:
        return []


def unpack_share(
    order: StepPlan,
    topology: Topology,
    frames: Sequence[Frame],
    *,
    vocab_size: int,
    longest: int = MAX_TOKENS,
    max_turns: int = MAX_TOKENS,
    experts: ExpertSizes | None = None,
    images: ImageReader | None = None,
) -> dict[int, TrainTrajectory] | Rejection:
    """Return this replica's sequences by index, or the reason that no rank trains the step.

    Without ``images`` the policy sees none.
    All ranks call this with the result of ``fetch_payloads``, and either all train or none.
    """
    headers = order.headers
    sequences: dict[int, TrainTrajectory] = {}
    is_bad = bars_other_ends(headers)
    for i, frame in zip(order.wanted(topology.data_parallel_rank), frames, strict=True):
        try:
            payload = decode_payload(frame)
            sequences[i] = unpack(
                headers[i],
                payload,
                vocab_size=vocab_size,
                longest=longest,
                max_turns=max_turns,
                experts=experts,
            )
            seen = seen_images(images, payload.images, sequences[i])
            sequences[i] = replace(sequences[i], images=seen)
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
