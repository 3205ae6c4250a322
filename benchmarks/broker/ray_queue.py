"""Trajectories per second over ray.util.queue, by batch size. Runs under a Python that has ray.

Usage: ray_queue.py NUM_BYTES SECONDS BATCH [BATCH ...]
Prints one JSON object: batch size to rate.
"""

import json
import os
import signal
import sys
import time

import ray
from ray.util.queue import Empty, Full, Queue

_WINDOW_BYTES = 64 * 1024 * 1024


@ray.remote(num_cpus=0)
def produce(queue: Queue, num_bytes: int, batch: int, seconds: float) -> None:
    blobs = [os.urandom(num_bytes) for _ in range(batch)]  # one object would be pickled once
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if batch == 1:
                queue.put(blobs[0], timeout=1.0)
            else:
                queue.put_nowait_batch(blobs)
        except Full:
            time.sleep(0.001)


@ray.remote(num_cpus=0)
def take(queue: Queue, batch: int, seconds: float) -> float:
    taken, began, end = 0, 0.0, time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        try:
            got = [queue.get(timeout=1.0)] if batch == 1 else queue.get_nowait_batch(batch)
        except Empty:
            time.sleep(0.001)
            continue
        if not began and now > end - 0.7 * seconds:  # what comes before is for warming up
            began = time.monotonic()
        elif began:
            taken += len(got)
    return taken / (time.monotonic() - began) if began else 0.0


def main() -> int:
    num_bytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rates = {}
    try:
        for batch in map(int, sys.argv[3:]):
            room = max(4 * batch, min(1024, _WINDOW_BYTES // num_bytes))
            queue = Queue(maxsize=room, actor_options={"num_cpus": 0})
            whole = seconds / 0.7
            sending = produce.remote(queue, num_bytes, batch, whole + 0.5)
            rates[batch] = ray.get(take.remote(queue, batch, whole))
            queue.shutdown(force=True)
            ray.cancel(sending, force=True)
    finally:
        ray.shutdown()
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
