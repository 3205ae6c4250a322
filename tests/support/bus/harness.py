"""A weight bus of real processes: a learner, its relay, agents beside engines of plain tensors."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import nursery
from tests.support.bus.engine import digest_of, random_tensors, tokens_in
from tests.support.bus.nccl_manners import MARK
from tests.support.waiting import HANG_S, NEVER_S, state_of, until

CONFIG = """
[run]
name = "bus"
dir = "{folder}/runs"
model = "{folder}"
socket_dir = "{folder}/sockets"
outage_s = 1000

[weightbus]
timeout_s = {timeout_s}
receive_timeout_s = {receive_timeout_s}
member_silence_s = {member_silence_s}
linger_s = {linger_s}
engines_per_group = {engines_per_group}
bulk = "{bulk}"
"""


class WeightBus:
    """All processes of one weight bus, and what their engines generated.

    No deadline of the bus runs out unless a test gives it one that does.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines_per_group: int = 1,
        timeout_s: float = NEVER_S,
        receive_timeout_s: float = NEVER_S,
        member_silence_s: float = NEVER_S,
        linger_s: float = HANG_S,
        sizes: Sequence[str] = (),
        bucket_bytes: int = 2 * 4096 * 4,
        parts: int = 1,
        bulk: str = "encrypted",
        manners: str = "gloo",
    ) -> None:
        """Start a learner, which starts its relay.

        Args:
            folder: short, private.
            engines_per_group: weightbus.engines_per_group.
            timeout_s: weightbus.timeout_s.
            receive_timeout_s: weightbus.receive_timeout_s.
            member_silence_s: weightbus.member_silence_s.
            linger_s: weightbus.linger_s.
            sizes: --count and --size of the model.
            bucket_bytes: weightbus.bucket_bytes.
            parts: hosts of the learner, each with a relay.
            bulk: weightbus.bulk.
            manners: of its groups; "nccl" for those of nccl_manners.py.
        """
        self.folder = folder
        self.manners = manners
        self.bulk = bulk
        self._parts = str(parts)
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.sizes = list(sizes)
        self._epoch = 0
        self._group_timeout_s = str(2 * timeout_s)
        self._bucket_bytes = str(bucket_bytes)
        self._digests: dict[str, str] = {}
        self.learner: subprocess.Popen[str]
        config = CONFIG.format(
            folder=folder,
            engines_per_group=engines_per_group,
            timeout_s=timeout_s,
            member_silence_s=member_silence_s,
            receive_timeout_s=receive_timeout_s,
            linger_s=linger_s,
            bulk=bulk,
        )
        (folder / "run.toml").write_text(config)
        (folder / "sockets").mkdir(mode=0o700, exist_ok=True)
        self.start_learner()

    # ---- the learner and its relay -------------------------------------------

    def start_learner(self) -> None:
        """Start a learner; a second one begins a new epoch."""
        self._epoch += 1
        self.learner = self._start(
            "learner",
            *("--folder", str(self.folder), "--epoch", str(self._epoch)),
            *("--bucket-bytes", self._bucket_bytes, *self.sizes, "--manners", self.manners),
            *("--parts", self._parts),
            log="learner",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._printed() == "ready"

    def publish(self, step: int) -> None:
        """Have a version published; the learner is free again when this returns."""
        self.command(f"publish {step}")
        assert self._printed() == f"published {step}"

    def publish_half(self, step: int) -> None:
        """Have the learner begin to write a version and go no further."""
        self.command(f"half {step}")
        assert self._printed() == "half"

    def command(self, line: str) -> None:
        assert self.learner.stdin is not None
        self.learner.stdin.write(line + "\n")
        self.learner.stdin.flush()

    def _start(self, program: str, *words: str, log: str, **pipes: int) -> "subprocess.Popen[str]":
        """Start a program of this folder; what is no pipe goes to its log."""
        with (self.folder / f"{log}.log").open("a") as file:
            return nursery.start(
                [sys.executable, "-m", f"tests.support.bus.{program}", *words],
                env=dict(os.environ),  # noqa: TID251 handed on
                **{"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, **pipes},
            )

    def _printed(self) -> str:
        assert self.learner.stdout is not None
        line = self.learner.stdout.readline().strip()
        assert line, (self.folder / "learner.log").read_text()[-3000:]
        return line

    def learner_ends(self) -> int:
        """Return the learner's exit code; if it hangs, the error has where each thread is."""
        try:
            return self.learner.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.learner.send_signal(signal.SIGUSR1)
            time.sleep(1.0)  # in which it writes
            raise AssertionError((self.folder / "learner.log").read_text()[-6000:]) from None

    def kill_learner(self) -> None:
        self.learner.kill()
        for pipe in (self.learner.stdin, self.learner.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self.learner.wait(HANG_S)

    @property
    def relay(self) -> int:
        """Return the process of the relay, 0 if there was none yet."""
        return self._pid_in("relay.lock")

    def _pid_in(self, lock: str) -> int:
        with suppress(OSError, ValueError):  # it is written anew by the next relay
            return int((self.folder / "sockets" / lock).read_text())
        return 0

    def part(self, number: int) -> int:
        """Return the process of the relay of another host than the first, 0 between two."""
        return self._pid_in(f"relay-{number}.lock")

    def kill_at(self, number: int, count: int) -> Path:
        """Have the relay of a host killed at a message, counted from now; then the file is gone."""
        order = self.folder / f"relay-{number}.kill"
        order.write_text(str(count))
        return order

    def kill_relay(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.relay, signum)

    def relay_memory(self, kind: str) -> int:
        """Return bytes of the relay's memory of a kind, as in /proc/PID/status."""
        status = Path(f"/proc/{self.relay}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{kind}:"))
        return int(line.split()[1]) * 1024

    def relay_lives(self) -> bool:
        relay = self.relay
        return relay != 0 and state_of(relay) not in "ZX"

    def _relays(self) -> list[int]:
        """Return all relays of this bus, also those that do not serve yet or any more."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_text().split("\0")
                if (
                    "slipstream.weightbus.relay.main" in words
                    and str(self.folder / "run.toml") in words
                ):
                    found.append(int(path.parent.name))
        return found

    # ---- agents --------------------------------------------------------------

    def start(self, name: str, transport: str = "collective", *more: str) -> None:
        """Start an agent; an earlier one of this name has died.

        Over "tcp" it fetches; "mapped" is tcp of an agent that sees the learner's memory.
        """
        if transport == "tcp":
            more = (*more, "--out-of-sight")
        transport = "tcp" if transport == "mapped" else transport
        if name in self.agents:
            self.agents.pop(name).wait(HANG_S)
        self.agents[name] = self._start(
            "agent",
            *("--folder", str(self.folder), "--name", name, "--transport", transport),
            *("--group-timeout-s", self._group_timeout_s, "--manners", self.manners),
            *(*self.sizes, *more),
            log=name,
        )

    def start_faulty(
        self,
        name: str,
        step: str,
        counts: list[int],
        do: str,
        transport: str = "collective",
        *more: str,
        is_armed: bool = True,
    ) -> None:
        """Start an agent that fails when it reached a step so many times since it failed last.

        Unless it is armed, it counts only once ``arm`` is called.
        """
        fault = json.dumps([step, counts, do])
        if is_armed:
            self.arm(name)
        self.start(name, transport, "--fault", fault, *more)

    def arm(self, name: str) -> None:
        (self.folder / f"{name}.armed").touch()

    def signal(self, name: str, signum: signal.Signals) -> None:
        self.agents[name].send_signal(signum)

    def end(self, name: str) -> None:
        """Kill an agent."""
        agent = self.agents.pop(name)
        agent.kill()
        agent.wait(HANG_S)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, step: int) -> None:
        """Wait until an engine generates with a version."""
        label = f"v{self._epoch}.{step}"
        until(
            lambda: self.newest_label(name) == label,
            lambda: (
                f"{name} does not run {label}: {self.newest_label(name)}\n"
                f"{self.log_of(name)[-2000:]}\n{(self.folder / 'learner.log').read_text()[-3000:]}"
            ),
        )

    def brings(self, step: int, *names: str) -> None:
        """Have a version published, and wait until engines generate with it."""
        self.publish(step)
        for name in names:
            self.wait_for(name, step)

    def newest_label(self, name: str) -> str:
        tokens = tokens_in(self.folder / f"{name}.tokens")
        return tokens[-1][0] if tokens else ""

    def labels(self, name: str) -> list[str]:
        """Return the versions that an engine generated with, in order, without repetitions."""
        labels = [label for label, _ in tokens_in(self.folder / f"{name}.tokens")]
        return [one for i, one in enumerate(labels) if i == 0 or labels[i - 1] != one]

    def check_tokens(self) -> int:
        """Check that every token was made by the weights of its label; return their number."""
        count = 0
        for log in self.folder.glob("*.tokens"):
            for label, digest in tokens_in(log):
                assert digest == self._expected(label), f"{log.stem}: {label} is a mixture"
                count += 1
        assert count > 0
        return count

    def _expected(self, label: str) -> str:
        if label not in self._digests:
            sizes = {
                name.removeprefix("--"): int(value)
                for name, value in zip(self.sizes[::2], self.sizes[1::2], strict=True)
            }
            tensors = random_tensors(seed=int(label.partition(".")[2]), **sizes)
            self._digests[label] = digest_of(tensors)
        return self._digests[label]

    def close(self) -> None:
        """End all processes."""
        for name in list(self.agents):
            self.end(name)
        self.kill_learner()
        for relay in self._relays():
            with suppress(ProcessLookupError):
                os.kill(relay, signal.SIGKILL)


@contextmanager
def weight_bus(folder: Path, **settings: object) -> Iterator[WeightBus]:
    """Yield a weight bus; its processes end with the block."""
    bus = WeightBus(folder, **settings)  # type: ignore[arg-type]
    try:
        yield bus
        if bus.manners == "nccl":
            assert MARK in (folder / "learner.log").read_text(), "the relay has those of gloo"
    finally:
        bus.close()
