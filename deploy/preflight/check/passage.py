"""Bytes from the learner's host to another one, transferred as weights would be.

gloo and NCCL open a real group of two ranks. tcp uses the relay's listener, and both sides prove
keys. `weightbus.timeout_s` bounds every wait.
"""

import asyncio
import os
import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import zmq
import zmq.asyncio
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from slipstream.deploy.preflight.check.network import towards
from slipstream.deploy.preflight.check.requests import Invitation, Listen, Passage, Receive
from slipstream.weightbus.net import groups
from slipstream.weightbus.net.curve import RemoteListener, connect_to_door
from slipstream.weightbus.net.interfaces import NCCL_ENVIRONMENT, interface_variables
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.wire.errors import ConfigError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.weightbus import BulkDoor

NUM_BYTES = 16 << 20
_GROUP = "check"
_OWN = "check"  # name of the receiving host's key


class Sender(Protocol):
    """A host that listens for one other host."""

    invitation: Invitation

    def send(self) -> Passage:
        """Send, and stop listening."""


def open_sender(request: Listen, timeout_s: float) -> Sender:
    """Listen on this host for one other host.

    Raises:
        ConfigError: this host cannot listen at the address.
    """
    if request.way == "tcp":
        return _TcpSender(request, timeout_s)
    return _GroupSender(request, timeout_s)


def receive(request: Receive, timeout_s: float) -> Passage:
    """Receive the bytes on this host."""
    if request.way == "tcp":
        return asyncio.run(_receive_over_tcp(request, timeout_s))
    invitation = request.invitation
    interface = _prepare(invitation.address)
    try:
        store = TCPStore(
            invitation.address, invitation.port, 2, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        return Passage(interface=interface, failure=_first_sentence(error))
    return _passed(store, 1, request.way, interface, timeout_s)


class _GroupSender:
    """Rank 0 of a group of two."""

    def __init__(self, request: Listen, timeout_s: float) -> None:
        self._way, self._timeout_s = request.way, timeout_s
        self._interface = _prepare(request.address)
        self._store = open_store(request.address, world_size=2, timeout_s=timeout_s)
        self.invitation = Invitation(address=request.address, port=self._store.port)

    def send(self) -> Passage:
        """Broadcast from rank 0."""
        return _passed(self._store, 0, self._way, self._interface, self._timeout_s)


def _prepare(address: str) -> str:
    """Make gloo and NCCL use the interface that leads to an address; return it."""
    environment = os.environ  # noqa: TID251 gloo and NCCL have no setting
    environment.update({**NCCL_ENVIRONMENT, **interface_variables(address, environment)})
    return towards(address)


def _passed(store: TCPStore, rank: int, backend: str, interface: str, timeout_s: float) -> Passage:
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    group: dist.ProcessGroup | None = None
    try:
        group = groups.open_group(
            backend, store, name=_GROUP, rank=rank, world_size=2, timeout_s=timeout_s
        )
        groups.pass_first_byte(group, device, timeout_s=timeout_s)
        flat = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
        start_s = time.monotonic()
        groups.broadcast(flat, group, timeout_s=timeout_s)
        seconds = time.monotonic() - start_s
        # rank 0 stays until rank 1 has everything: its store ends with it
        groups.pass_first_byte(group, device, timeout_s=timeout_s)
    except (RuntimeError, PublishError) as error:
        return Passage(interface=interface, failure=_first_sentence(error))
    finally:
        if group is not None:
            groups.release(group)
    return Passage(interface=interface, num_bytes=NUM_BYTES, seconds=seconds)


class _TcpSender:
    """The relay's listener, which admits one key."""

    def __init__(self, request: Listen, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interface = towards(request.address)
        self._runner = asyncio.Runner()
        self._context = zmq.asyncio.Context()
        self._listener = RemoteListener(f"tcp://{request.address}:0")
        self._listener.admit({request.public_key: _OWN})
        self._socket, self._bulk = self._runner.run(self._open())
        address = self._listener.address
        if address is None:
            raise ConfigError(f"{request.address} is not listened at (weightbus.listen)")
        port = int(address.bulk_endpoint.rpartition(":")[2])
        self.invitation = Invitation(address=request.address, port=port, key=address.key)

    async def _open(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        return self._listener.open(self._context)

    def send(self) -> Passage:
        """Answer the request of the other host with the bytes."""
        try:
            return self._runner.run(self._answer())
        finally:
            self._runner.close()
            self._context.destroy(linger=int(1e3 * self._timeout_s))

    async def _answer(self) -> Passage:
        try:
            async with asyncio.timeout(self._timeout_s):
                for part in (b"hello", bytes(NUM_BYTES)):
                    peer, *_ = await self._bulk.recv_multipart()
                    await self._bulk.send_multipart([peer, part])
                await self._bulk.recv_multipart()  # the other host has the bytes
        except TimeoutError:
            why = f"nobody came within {self._timeout_s:g} s"
            return Passage(interface=self._interface, failure=why)
        finally:
            self._listener.close()
        return Passage(interface=self._interface, num_bytes=NUM_BYTES)


async def _receive_over_tcp(request: Receive, timeout_s: float) -> Passage:
    invitation = request.invitation
    interface = towards(invitation.address)
    key = ClientKey(
        name=_OWN,
        role="generator",
        public=request.public_key,
        secret=request.secret_key,
        broker=invitation.key,
    )
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, int(1e3 * timeout_s))
        endpoint = f"tcp://{invitation.address}:{invitation.port}"
        connect_to_door(socket, BulkDoor(endpoint=endpoint, key=invitation.key), key)
        try:
            async with asyncio.timeout(timeout_s):
                await socket.send(b"hello")
                await socket.recv()  # keys are proved
                start_s = time.monotonic()
                await socket.send(b"bytes")
                received = await socket.recv()
                seconds = time.monotonic() - start_s
                await socket.send(b"end")
        except TimeoutError:
            socket.setsockopt(zmq.LINGER, 0)
            return Passage(interface=interface, failure=f"no answer within {timeout_s:g} s")
    return Passage(interface=interface, num_bytes=len(received), seconds=seconds)


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of torch; the rest describes a single attempt."""
    return str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
