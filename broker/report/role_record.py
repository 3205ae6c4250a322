"""Reports of one process about itself."""

from dataclasses import dataclass, field

from slipstream.wire.messages.broker import Hello, RoleReport
from slipstream.wire.messages.status import Pace, RoleStatus
from slipstream.wire.process.phases import busy_share


@dataclass(slots=True)
class RoleRecord:
    """The last report of one process."""

    hello: Hello
    since_s: float
    last_message_s: float
    has_left: bool = False  # sent Goodbye
    tokens_before: float | None = None  # its hello; None until it reports
    report: RoleReport = field(default_factory=lambda: RoleReport(phase_seconds={}, counters={}))

    @property
    def tokens(self) -> float:
        """Number of tokens reported since its hello."""
        return self.report.counters.get("tokens", 0.0) - (self.tokens_before or 0.0)

    def status(self, now_s: float, leases: int) -> RoleStatus:
        """Return the status of the process."""
        age = max(now_s - self.since_s, 1e-9)
        acting = self.report.gauges.get("acting")
        return RoleStatus(
            name=self.hello.name,
            role=self.hello.role,
            age_s=age,
            silent_s=now_s - self.last_message_s,
            busy=busy_share(self.report.phase_seconds),
            phase_seconds=self.report.phase_seconds,
            tokens_per_second=self.tokens / age,
            adopted=self.report.adopted,
            leases=leases,
            trajectories=self.report.counters.get("trajectories", 0.0),
            retracted=self.report.counters.get("retracted", 0.0),
            kv_use=self.report.gauges.get("kv_use"),
            sequences=int(self.report.gauges.get("sequences", 0.0)),
            sequence_limit=int(self.report.gauges.get("sequence_limit", 0.0)),
            lane_share=self.report.gauges.get("lane_share"),
            has_left=self.has_left,
            decision_bytes_per_token=self.report.counters.get("decision_bytes", 0.0)
            / max(1.0, self.report.counters.get("tokens", 0.0)),
            probes=self.report.counters.get("probes", 0.0),
            probe_difference=self.report.gauges.get("probe_difference"),
            probe_bound=self.report.gauges.get("probe_bound"),
            acting=None if acting is None else int(acting),
            environment_failed=self.report.counters.get("environment_failed", 0.0),
            unknown_calls=self.report.counters.get("unknown_calls", 0.0),
            unreadable_calls=self.report.counters.get("unreadable_calls", 0.0),
            rewritten=self.report.rewritten,
            engine_s=self.report.counters.get("engine_s", 0.0),
            environment_s=self.report.counters.get("environment_s", 0.0),
            pace=self._pace(),
            cpu_cores=self.report.gauges.get("cpu_cores"),
            memory_bytes=self.report.gauges.get("memory_bytes"),
            gpu_bytes=self.report.gauges.get("gpu_bytes"),
            gpu_busy=self.report.gauges.get("gpu_busy"),
        )

    def _pace(self) -> Pace | None:
        counters = self.report.counters
        if not counters.get("pace_tokens"):
            return None
        return Pace(
            tokens=counters["pace_tokens"],
            sequences=counters.get("pace_sequences", 0.0),
            squares=counters.get("pace_squares", 0.0),
            seconds=counters.get("pace_s", 0.0),
            sequence_seconds=counters.get("pace_sequence_s", 0.0),
        )
