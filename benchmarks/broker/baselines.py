"""What the broker's throughput is compared with: the same bytes from one process to another.

Each hands over one blob per trajectory, as large as payload, response and header together, and
has a window of blobs that the consumer has not taken yet, so that all memory stays bounded.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from typing_extensions import override

from benchmarks.bars import NotRun
from benchmarks.broker.process import (
    Driver,
    SharedNumber,
    bare_redis,
    drivers,
    shared_number,
    work_folder,
)
from benchmarks.broker.roles import BYTES_PER_TOKEN, trajectory_bytes

HEADER_BYTES = 100
WARM_S = 0.7
_WINDOW_BYTES = 64 * 1024 * 1024
_KEYS = 4_096
_STREAM = "trajectories"
_POLL_S = 0.0005
_RAY_SCRIPT = Path(__file__).with_name("ray_queue.py")
_HTTP_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use a baseline."""

    batch: int = 1
    transaction: bool = False
    connections: int = 1
    typed: bool = False

    @override
    def __str__(self) -> str:
        return f"{self.batch} to a batch" + ", MULTI/EXEC" * self.transaction


def blob_bytes(payload_bytes: int) -> int:
    return trajectory_bytes(payload_bytes).num_bytes + HEADER_BYTES


# ---- Redis -------------------------------------------------------------------


def _connect(socket: str, password: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=socket, password=password)


def set_blobs(
    socket: str,
    password: str,
    num_bytes: int,
    way: Way,
    sent: SharedNumber,
    taken: SharedNumber,
    stop: SharedNumber,
) -> None:
    """Producer: SET, ``way.batch`` to a pipeline; ``sent`` counts what Redis acknowledged."""
    client, blob = _connect(socket, password), os.urandom(num_bytes)
    window = max(2 * way.batch, min(_KEYS - way.batch, _WINDOW_BYTES // num_bytes))
    done = 0
    while not stop.value:
        if done + way.batch - taken.value > window:
            time.sleep(_POLL_S)
            continue
        pipeline = client.pipeline(transaction=way.transaction)
        for i in range(done, done + way.batch):
            pipeline.set(f"k{i % _KEYS}", blob)
        pipeline.execute()
        done += way.batch
        sent.value = done


def get_blobs(
    socket: str,
    password: str,
    num_bytes: int,
    way: Way,
    sent: SharedNumber,
    taken: SharedNumber,
    stop: SharedNumber,
) -> None:
    """Consumer: GET what was acknowledged, ``way.batch`` to a pipeline."""
    client = _connect(socket, password)
    done = 0
    while not stop.value:
        if sent.value < done + way.batch:
            time.sleep(_POLL_S)
            continue
        pipeline = client.pipeline(transaction=False)
        for i in range(done, done + way.batch):
            pipeline.get(f"k{i % _KEYS}")
        if any(len(blob) != num_bytes for blob in pipeline.execute()):
            raise ValueError("Redis returned other bytes")
        done += way.batch
        taken.value = done


def add_pickles(
    socket: str,
    password: str,
    num_bytes: int,
    _way: Way,
    sent: SharedNumber,
    taken: SharedNumber,
    stop: SharedNumber,
) -> None:
    """Producer: one XADD of one pickle per message."""
    client, blob = _connect(socket, password), os.urandom(num_bytes - HEADER_BYTES)
    window = min(_KEYS, _WINDOW_BYTES // num_bytes)
    done = 0
    while not stop.value:
        if done - taken.value > window:
            time.sleep(_POLL_S)
            continue
        record = {"group_id": done, "sibling": 0, "version": (1, 2), "payload": blob}
        data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        client.xadd(_STREAM, {"d": data}, maxlen=_KEYS, approximate=True)
        done += 1
        sent.value = done


def read_pickles(
    socket: str,
    password: str,
    _num_bytes: int,
    way: Way,
    _sent: SharedNumber,
    taken: SharedNumber,
    stop: SharedNumber,
) -> None:
    """Consumer: XREAD and unpickle."""
    client = _connect(socket, password)
    last, done = b"0", 0
    while not stop.value:
        found: Any = client.xread({_STREAM: last}, count=way.batch, block=100)
        for _, entries in found or ():
            for last, fields in entries:  # noqa: B007 the newest id is where to read on
                pickle.loads(fields[b"d"])  # noqa: S301 our own bytes
                done += 1
        taken.value = done


def redis_rate(
    produce: Callable[..., None],
    take: Callable[..., None],
    num_bytes: int,
    way: Way,
    seconds: float,
) -> float:
    """Trajectories per second from a producer to a consumer over a Redis of its own."""
    with work_folder() as folder, bare_redis(folder) as server:
        sent, taken, stop = shared_number(), shared_number(), shared_number()
        arguments = (str(server.socket), server.password, num_bytes, way, sent, taken, stop)
        with drivers(Driver(produce, *arguments), Driver(take, *arguments)) as running:
            rate = _rate_of(taken, seconds)
            stop.value = 1
            for driver in running:
                driver.result(20)
    return rate


def _rate_of(taken: SharedNumber, seconds: float) -> float:
    """Count while it runs, from some time after the first blob on."""
    deadline = time.monotonic() + 30
    while not taken.value:
        if time.monotonic() > deadline:
            raise TimeoutError("no trajectory came through in 30 s")
        time.sleep(0.01)
    time.sleep(WARM_S)
    first, began = taken.value, time.monotonic()
    time.sleep(seconds)
    return float((taken.value - first) / (time.monotonic() - began))


SET_GET_WAYS = [Way(batch, multi) for batch in (16, 64, 256) for multi in (False, True)]
set_get_rate = partial(redis_rate, set_blobs, get_blobs)
xadd_rate = partial(redis_rate, add_pickles, read_pickles)


# ---- ray.util.queue ----------------------------------------------------------


def ray_rates(python: str, num_bytes: int, batches: list[int], seconds: float) -> dict[int, float]:
    """Trajectories per second by batch size, from one actor to another; ray has its own Python."""
    arguments = [str(num_bytes), str(seconds), *map(str, batches)]
    process = subprocess.Popen(
        [python, str(_RAY_SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=False,
    )
    try:
        output, errors = process.communicate(timeout=60 + 10 * seconds * len(batches))
    except BaseException:
        process.terminate()  # its handler ends ray's processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"{_RAY_SCRIPT.name} failed:\n{errors[-2000:]}")
    return {int(b): float(rate) for b, rate in json.loads(output.splitlines()[-1]).items()}


# ---- HTTP and JSON -----------------------------------------------------------


def lists_of(payload_bytes: int) -> dict[str, object]:
    """A trajectory as lists of numbers, as many tokens as the payload holds."""
    num_tokens = payload_bytes // BYTES_PER_TOKEN
    return {
        "group_id": 7,
        "sibling": 1,
        "version": [1, 2],
        "token_ids": [(i * 7919) % 50_000 for i in range(num_tokens)],
        "loss_mask": [i > 64 for i in range(num_tokens)],
        "behavior_logprobs": [-((i * 31) % 997) / 313.7 for i in range(num_tokens)],
        "response": "the sum is 42 " * 24,
    }


def serve_http(port: SharedNumber, typed: bool) -> None:
    """A queue behind POST and GET; uvicorn with uvloop and httptools where they are installed."""
    from benchmarks.broker.http_queue import run_server

    run_server(port, typed=typed)


def http_client(
    port: int, payload_bytes: int, way: Way, produces: bool, count: SharedNumber, stop: SharedNumber
) -> None:
    """Producer or consumer with several connections that are kept."""
    from benchmarks.broker.http_queue import run_client

    asyncio.run(run_client(port, lists_of(payload_bytes), way, produces, count, stop))


def http_rate(payload_bytes: int, way: Way, seconds: float) -> float:
    port, sent, taken, stop = (shared_number() for _ in range(4))
    with drivers(Driver(serve_http, port, way.typed)):
        deadline = time.monotonic() + _HTTP_START_S
        while not port.value:
            if time.monotonic() > deadline:
                raise TimeoutError("the HTTP server did not start")
            time.sleep(0.02)
        clients = [
            Driver(http_client, port.value, payload_bytes, way, produces, count, stop)
            for produces, count in ((True, sent), (False, taken))
        ]
        with drivers(*clients):
            rate = _rate_of(taken, seconds)
            stop.value = 1
            for client in clients:
                client.result(20)
    return rate


HTTP_WAYS = [Way(batch, connections=4, typed=typed) for typed in (True, False) for batch in (1, 8)]


def describe_http(way: Way) -> str:
    how = "pydantic models" if way.typed else "orjson, nothing checked"
    return f"{how}, {way.batch} to a request, {way.connections} connections"


def python_with_ray(python: str) -> str | NotRun:
    """Return the Python that was named, or this one, if it has ray."""
    candidate = python or sys.executable
    try:
        found = subprocess.run(
            [candidate, "-c", "import ray"], capture_output=True, timeout=60, check=False
        )
    except OSError as error:
        return NotRun(f"{candidate}: {error.strerror} (--ray-python)")
    if found.returncode:
        return NotRun(f"{candidate} has no ray: give --ray-python PATH")
    return candidate
