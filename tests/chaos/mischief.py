"""A proxy between clients and broker that delivers messages twice, late and in another order."""

import argparse
import asyncio
import random
from pathlib import Path

import zmq
import zmq.asyncio


class Mischief:
    """One socket to the broker per client, so that the broker sees one connection per client."""

    def __init__(self, seed: int, broker: str) -> None:
        self._rng = random.Random(seed)
        self._broker = broker
        self._context = zmq.asyncio.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, endpoint: str) -> None:
        self._front.bind(endpoint)
        while True:
            client, *frames = await self._front.recv_multipart()
            if client not in self._backs:
                back = self._backs[client] = self._context.socket(zmq.DEALER)
                back.setsockopt(zmq.LINGER, 0)
                back.connect(self._broker)
                self._start(self._answers(client, back))
            self._start(self._deliver(self._backs[client], frames))

    async def _answers(self, client: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            frames = await back.recv_multipart()
            self._start(self._deliver(self._front, [client, *frames]))

    async def _deliver(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        for _ in range(2 if self._rng.random() < 0.2 else 1):
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.expovariate(1 / 0.05))
            await socket.send_multipart(frames)

    def _start(self, job: object) -> None:
        task = asyncio.create_task(job)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--broker", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.clients.parent.mkdir(mode=0o700, exist_ok=True)
    asyncio.run(
        Mischief(arguments.seed, f"ipc://{arguments.broker}").serve(f"ipc://{arguments.clients}")
    )


if __name__ == "__main__":
    main()
