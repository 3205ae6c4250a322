"""A weight bus of real processes: a learner, its relay, agents beside engines of plain tensors."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.bus_engine import digest_of, random_tensors, tokens_in
from wire.processes import bound_to_me

ROOT = Path(__file__).parents[1]
CONFIG = """
[run]
name = "bus"
dir = "{folder}/runs"
model = "{folder}"
socket_dir = "{folder}/sockets"
outage_s = 1000

[weightbus]
timeout_s = {timeout_s}
receive_timeout_s = 10
member_silence_s = 4
linger_s = {linger_s}
engines_per_group = {engines_per_group}
"""


class WeightBus:
    """All processes of one weight bus, and what their engines generated."""

    def __init__(
        self,
        folder: Path,
        *,
        engines_per_group: int = 1,
        timeout_s: float = 4.0,
        linger_s: float = 20.0,
        sizes: Sequence[str] = (),
        bucket_bytes: int = 2 * 4096 * 4,
    ) -> None:
        """Start a learner, which starts its relay.

        Args:
            folder: short, private.
            engines_per_group: weightbus.engines_per_group.
            timeout_s: weightbus.timeout_s.
            linger_s: weightbus.linger_s.
            sizes: --count and --size of the model.
            bucket_bytes: weightbus.bucket_bytes.
        """
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.sizes = list(sizes)
        self._epoch = 0
        self._bucket_bytes = str(bucket_bytes)
        self._digests: dict[str, str] = {}
        self.learner: subprocess.Popen[str]
        config = CONFIG.format(
            folder=folder,
            engines_per_group=engines_per_group,
            timeout_s=timeout_s,
            linger_s=linger_s,
        )
        (folder / "run.toml").write_text(config)
        (folder / "sockets").mkdir(mode=0o700)
        self.start_learner()

    # ---- the learner and its relay -------------------------------------------

    def start_learner(self) -> None:
        """Start a learner; a second one begins a new epoch."""
        self._epoch += 1
        with (self.folder / "learner.log").open("a") as log:
            self.learner = subprocess.Popen(
                [
                    *_program("bus_learner", self.folder),
                    *("--epoch", str(self._epoch), "--bucket-bytes", self._bucket_bytes),
                    *self.sizes,
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=bound_to_me(),
            )
        assert self._said() == "ready"

    def publish(self, step: int) -> float:
        """Have a version published; return how long the learner was busy with it."""
        began_s = time.monotonic()
        self.tell(f"publish {step}")
        assert self._said().startswith(f"published {step}")
        return time.monotonic() - began_s

    def tell(self, line: str) -> None:
        assert self.learner.stdin is not None
        self.learner.stdin.write(line + "\n")
        self.learner.stdin.flush()

    def _said(self) -> str:
        assert self.learner.stdout is not None
        line = self.learner.stdout.readline().strip()
        assert line, (self.folder / "learner.log").read_text()[-3000:]
        return line

    def kill_learner(self) -> None:
        self.learner.kill()
        self.learner.wait()
        for pipe in (self.learner.stdin, self.learner.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    @property
    def relay(self) -> int:
        """Return the process of the relay, 0 if there was none yet."""
        with suppress(OSError, ValueError):
            return int((self.folder / "sockets" / "relay.lock").read_text())
        return 0

    def kill_relay(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.relay, signum)

    def relay_memory(self, kind: str) -> int:
        """Return bytes of the relay's memory of a kind, as in /proc/PID/status."""
        status = Path(f"/proc/{self.relay}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{kind}:"))
        return int(line.split()[1]) * 1024

    def relay_lives(self) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{self.relay}/stat").read_text().split()[2] != "Z"
        return False

    # ---- agents --------------------------------------------------------------

    def start(self, name: str, transport: str = "collective", *more: str) -> None:
        """Start an agent; an earlier one of this name has died."""
        if name in self.agents:
            self.agents.pop(name).wait(5)
        with (self.folder / f"{name}.log").open("a") as log:
            self.agents[name] = subprocess.Popen(
                [
                    *_program("bus_agent", self.folder),
                    *("--name", name, "--transport", transport),
                    *self.sizes,
                    *more,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                text=True,
                preexec_fn=bound_to_me(),
            )

    def start_faulty(
        self, name: str, step: str, counts: list[int], do: str, transport: str = "collective"
    ) -> None:
        """Start an agent that fails when it reached a step so many times since it failed last."""
        self.start(name, transport, "--fault", json.dumps([step, counts, do]))

    def signal(self, name: str, signum: signal.Signals) -> None:
        self.agents[name].send_signal(signum)

    def end(self, name: str) -> None:
        """Kill an agent."""
        agent = self.agents.pop(name)
        with suppress(ProcessLookupError):
            agent.kill()
        agent.wait()

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, step: int, *, timeout_s: float = 25.0) -> float:
        """Wait until an engine generates with a version; return the seconds."""
        began_s = time.monotonic()
        label = f"v{self._epoch}.{step}"
        until(
            lambda: self.newest_label(name) == label,
            timeout_s,
            lambda: (
                f"{name} does not run {label}: {self.newest_label(name)}\n"
                f"{self.log_of(name)[-2000:]}\n{(self.folder / 'learner.log').read_text()[-3000:]}"
            ),
        )
        return time.monotonic() - began_s

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
        relay = self.relay if self.relay_lives() else 0
        for name in list(self.agents):
            self.end(name)
        self.kill_learner()
        if relay:
            with suppress(ProcessLookupError):
                os.kill(relay, signal.SIGKILL)


@contextmanager
def weight_bus(folder: Path, **settings: object) -> Iterator[WeightBus]:
    """Yield a weight bus; its processes end with the block."""
    bus = WeightBus(folder, **settings)  # type: ignore[arg-type]
    try:
        yield bus
    finally:
        bus.close()


def until(
    is_so: Callable[[], bool], timeout_s: float, what: Callable[[], str] = lambda: ""
) -> None:
    """Wait until something is so, or fail."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def _program(name: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", f"tests.{name}", "--folder", str(folder)]
