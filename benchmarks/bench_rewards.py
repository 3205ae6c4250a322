"""What scoring costs: CPU per trajectory of broker, Redis and worker, without the function.

A real broker with its private Redis holds trajectories that wait for a reward; a real
``start-reward-worker`` scores them with a function that returns a constant. The time of that
function, called in a plain loop in the same run, is taken off. Medians of alternating turns.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from benchmarks.bars import Bars
from benchmarks.broker.peer import Peer
from benchmarks.broker.process import (
    ROOT,
    BrokerProcess,
    Driver,
    cpu_s,
    drivers,
    shared_number,
    work_folder,
)
from benchmarks.broker.roles import generate, pack, trajectory_bytes
from slipstream.broker.rewards.loading import load_function
from slipstream.wire.messages.broker import GetStatus, StatusAnswer, TakeOver, TookOver
from slipstream.wire.messages.status import RunStatus
from slipstream.wire.messages.trajectory import Prompt, Transcript
from slipstream.wire.process.processes import bound_to_me, last_lines

CREDITS = (64, 256)
NEEDS_MS = 1.0
_TURNS = 3
_COUNT = 5_000
_WARM = 1_000
_GROUP_SIZE = 8
_PAYLOAD_BYTES = 16 * 1024
_POLL_S = 0.05
_LONGEST_S = 120.0
_FUNCTION = """
def constant(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""
_EXAMPLES = """examples:
  python -m benchmarks.bench_rewards
  python -m benchmarks.bench_rewards --count 20000 --turns 1"""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds per trajectory, and trajectories per second."""

    broker: float
    redis: float
    worker: float
    children: float  # with the function
    rate: float

    @property
    def ours(self) -> float:
        return self.broker + self.redis + self.worker + self.children


class Worker:
    """``start-reward-worker`` with its children."""

    def __init__(self, folder: Path, credits_: int) -> None:
        reward = folder / "constant.py"
        reward.write_text(_FUNCTION)
        self._log = folder / "worker.txt"
        command = [
            *(
                sys.executable,
                "-m",
                "slipstream.broker.reward_worker.main",
                "--config",
                str(folder / "run.toml"),
            ),
            *("--reward", f"{reward}:constant", "--name", "worker"),
            *("run.name=r", f"run.dir={folder}", f"reward.credits={credits_}"),
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=bound_to_me()
            )
        self._whole = psutil.Process(self.process.pid)

    def cpu(self) -> tuple[float, float]:
        """CPU seconds: the worker itself, and all that it has started."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the reward worker ended:\n{last_lines(self._log, 20)}")
        below = (child.pid for child in self._whole.children(recursive=True))
        return cpu_s(self.process.pid), sum(map(cpu_s, below))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Hold it while trajectories are made."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def measure(credits_: int, count: int) -> Cost:
    """Score so many trajectories that wait already."""
    settings: dict[str, object] = {
        "run__groups_per_step": (count + _WARM) // _GROUP_SIZE,
        "run__group_size": _GROUP_SIZE,
        "broker__drop_zero_variance": "false",
    }
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        learner = Peer(context, broker.endpoint, "learner", "learner")
        version = pack(learner.ask(TakeOver(step=0), TookOver).version)
        worker = Worker(folder, credits_)
        try:
            _make(broker, version, _WARM)
            _until_scored(learner, worker, _WARM)
            with worker.stopped():
                _make(broker, version, count)
                before = _all_cpu(broker, worker)
            began_s = time.monotonic()
            _until_scored(learner, worker, _WARM + count)
            seconds, after = time.monotonic() - began_s, _all_cpu(broker, worker)
        finally:
            worker.end()
            learner.close()
            context.term()
    per_trajectory = [1e3 * (b - a) / count for a, b in zip(before, after, strict=True)]
    return Cost(*per_trajectory, rate=count / seconds)


def _make(broker: BrokerProcess, version: int, count: int) -> None:
    """Have a generator submit so many trajectories."""
    number, stop = shared_number(version), shared_number()
    arguments = (broker.endpoint, _PAYLOAD_BYTES, number, stop, count, "generator-0")
    with drivers(Driver(generate, *arguments)) as (generator,):
        generator.result(_LONGEST_S)


def _until_scored(peer: Peer, worker: Worker, count: int) -> None:
    """Wait until the groups of so many trajectories are ready to be trained."""
    deadline_s = time.monotonic() + _LONGEST_S
    while _scored(peer.ask(GetStatus(), StatusAnswer).status) < count:
        worker.cpu()  # it is there
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{count} trajectories were not scored in {_LONGEST_S:.0f} s")
        time.sleep(_POLL_S)


def _scored(status: RunStatus) -> int:
    return _GROUP_SIZE * status.in_flight.get("ready", 0)


def _all_cpu(broker: BrokerProcess, worker: Worker) -> tuple[float, ...]:
    return cpu_s(broker.pid), cpu_s(broker.redis_pid), *worker.cpu()


def inline_ms(count: int) -> float:
    """CPU milliseconds per trajectory of the same function, called in a plain loop."""
    with work_folder() as folder:
        (folder / "constant.py").write_text(_FUNCTION)
        function = load_function(f"{folder / 'constant.py'}:constant", {})
        answer = Transcript(
            prompt=Prompt(prompt="what is the sum of 17 and 25?", ground_truth="42"),
            response=trajectory_bytes(_PAYLOAD_BYTES).response.decode(),
            num_response_tokens=100,
            finish_reason="stop",
        )
        began_s = time.process_time()
        for _ in range(count):
            function.call((answer,))
        return 1e3 * (time.process_time() - began_s) / count


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_rewards",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=_COUNT, help="trajectories to a turn")
    parser.add_argument("--turns", type=int, default=_TURNS, help="of each setting")
    parser.add_argument("--json", action="store_true", help="print every turn as JSON too")
    arguments = parser.parse_args()
    inline = statistics.median(inline_ms(arguments.count) for _ in range(_TURNS))
    print(f"the function in a plain loop: {1e3 * inline:.2f} us per trajectory", flush=True)
    turns: dict[int, list[Cost]] = {credits_: [] for credits_ in CREDITS}
    for _ in range(arguments.turns):
        for credits_, costs in turns.items():
            costs.append(measure(credits_, arguments.count))
            _show(f"{credits_} credits", costs[-1])
    bars = Bars()
    worst = 0.0
    for credits_, costs in turns.items():
        overhead = statistics.median(cost.ours for cost in costs) - inline
        worst = max(worst, overhead)
        print(f"  {credits_} credits: {overhead:.3f} ms without the function", flush=True)
    bars.at_most("scoring_overhead", worst, "ms", needs=NEEDS_MS)
    if arguments.json:
        print(json.dumps({k: [cost.ours for cost in v] for k, v in turns.items()}))
    return bars.exit_code


def _show(title: str, cost: Cost) -> None:
    print(
        f"  {title}: CPU per trajectory in us: broker {1e3 * cost.broker:.0f}, its Redis "
        f"{1e3 * cost.redis:.0f}, worker {1e3 * cost.worker:.0f}, its child "
        f"{1e3 * cost.children:.0f}; {cost.rate:.0f}/s",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
