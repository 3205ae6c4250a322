"""A replica's part of a step: payloads, sent from one rank to all ranks of the replica."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
    return _for_replica(
        topology,
        len(keys),
        None if link is None else partial(link.fetch, order.step, keys),
        step=f"step {order.step}",
        what="payloads",
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
    fetch = None if link is None else partial(_files_of, link, digests)
    contents = _for_replica(topology, len(digests), fetch, step="the step", what="images")
    return dict(zip(digests, map(bytes, contents), strict=True))


def _files_of(link: RankLink, digests: Sequence[str]) -> list[Frame]:
    found = link.fetch_images(digests)
    return [found.get(digest, b"") for digest in digests]


def _for_replica(
    topology: Topology, count: int, fetch: Callable[[], list[Frame]] | None, *, step: str, what: str
) -> list[Frame]:
    """Return what one rank fetches for its replica; all ranks call this.

    Args:
        topology: Ranks and replicas.
        count: Number of frames.
        fetch: Fetches them; None on other ranks.
        step: Name of the step, for messages.
        what: Kind of the frames, for messages.

    Raises:
        SlipstreamError: on every rank, if any rank could not fetch its frames.
    """
    frames: list[Frame] | None = None
    failure: SlipstreamError | None = None
    if fetch is not None:
        try:
            frames = fetch()
        except SlipstreamError as error:
            _log.exception("%s is abandoned: its %s cannot be fetched", step, what)
            failure = error
    if any_rank(failure is not None):
        raise failure or PeerLostError(
            f"{step} is abandoned: another learner rank could not fetch its {what}, its log has "
            "the reason"
        )
    if topology.sizes.per_replica == 1:
        return frames if frames is not None else []
    return broadcast_frames(
        frames, count, group=topology.replica_group, source=topology.replica_leader
    )


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
