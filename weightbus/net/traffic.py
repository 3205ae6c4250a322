"""Traffic of one end of the weight bus since it started, counted where it is moved."""

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Counters; bytes are of buckets, without message framing. Use it inside one event loop."""

    commands: int = 0  # sent by a relay, or carried out by an agent
    bucket_requests: int = 0  # answered
    sent_bytes: int = 0  # fetched from here
    refused_requests: int = 0  # requests for buckets not served, or not served to that key
    unproved_requests: int = 0  # also connections; of strangers or revoked keys: no answer
    relay_bytes: int = 0  # fetched from a relay
    forwarded_bytes: int = 0  # fetched from another engine's agent
    copied_bytes: int = 0  # within this host, by the bus itself
    left_doors: int = 0  # doors that failed and were replaced
    rejected_buckets: int = 0  # buckets with other bytes than the manifest's

    def as_counters(self) -> dict[str, float]:
        """Return the figures by name, for a report to the broker."""
        return {f"bus_{name}": float(value) for name, value in dataclasses.asdict(self).items()}
