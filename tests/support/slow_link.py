"""A link between two network namespaces with a delay and a rate, where the kernel has no netem.

``python -m tests.support.slow_link --devices A B --delay-s 0.04 --mbit 50`` makes two devices,
prints a line, and passes on what comes out of one to the other until its standard input ends. A
packet that would wait too long in the queue of its direction is dropped, as by a router.
"""

import argparse
import fcntl
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

_SET_DEVICE = 0x400454CA  # TUNSETIFF
_TUN, _NO_INFO = 0x0001, 0x1000
_MOST_BYTES = 65_536  # of a packet
_NOT_UP_S = 0.01
_QUEUE_S = 0.3  # of packets that wait for the rate


def device(name: str) -> int:
    """Make a device; return the descriptor at which its packets are read and written."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFO))
    return descriptor


def pass_on(source: int, target: int, *, delay_s: float, bytes_per_s: float) -> None:
    """Pass packets on, forever."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def write() -> None:
        while True:
            at_s, packet = waiting.get()
            if (left_s := at_s - time.monotonic()) > 0:
                time.sleep(left_s)
            with suppress(OSError):  # that end is not up yet
                os.write(target, packet)

    threading.Thread(target=write, daemon=True).start()
    free_s = 0.0  # when the packets before have left
    while True:
        try:
            packet = os.read(source, _MOST_BYTES)
        except OSError:  # it is moved to its namespace
            time.sleep(_NOT_UP_S)
            continue
        now_s = time.monotonic()
        starts_s = max(now_s, free_s)
        if starts_s - now_s > _QUEUE_S:
            continue
        free_s = starts_s + len(packet) / bytes_per_s
        waiting.put((free_s + delay_s, packet))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", nargs=2, required=True)
    parser.add_argument("--delay-s", type=float, required=True, help="in each direction")
    parser.add_argument("--mbit", type=float, required=True)
    arguments = parser.parse_args(words)
    ends = [device(name) for name in arguments.devices]
    for source, target in (ends, ends[::-1]):
        threading.Thread(
            target=pass_on,
            args=(source, target),
            kwargs={"delay_s": arguments.delay_s, "bytes_per_s": arguments.mbit * 125_000},
            daemon=True,
        ).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
