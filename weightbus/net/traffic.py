"""What one end of the weight bus has moved since it started, counted where it is moved."""

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Bytes are of buckets, without the framing of messages. Use it inside one event loop."""

    commands: int = 0  # sent by a relay, or carried out by an agent
    bucket_requests: int = 0  # answered
    sent_bytes: int = 0  # to whoever fetched them here
    refused_requests: int = 0  # for buckets that are not served, or not to that key
    unproved_requests: int = 0  # and connections, of strangers or revoked keys: no answer
    relay_bytes: int = 0  # fetched from a relay
    forwarded_bytes: int = 0  # fetched from another engine's agent
    copied_bytes: int = 0  # within this host, by the bus itself
    left_doors: int = 0  # where fetching failed and went on elsewhere
    rejected_buckets: int = 0  # whose bytes were not those of the manifest

    def as_counters(self) -> dict[str, float]:
        """Return the figures by name, for a report to the broker."""
        return {f"bus_{name}": float(value) for name, value in dataclasses.asdict(self).items()}
