"""A learner's source of batches and sink of results: the broker, or a file."""

from typing import TypeAlias

from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.batches.payload_link import PayloadLink
from slipstream.learner.batches.replay_link import ReplayLink

RankLink: TypeAlias = PayloadLink | ReplayLink
"""Link of the rank of a replica that fetches its payloads."""
LeadingLink: TypeAlias = LeaderLink | ReplayLink
"""Link of rank 0."""
