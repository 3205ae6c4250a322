"""Membership of a host in a learner, and the key that its hosts share through the run folder.

Node 0 writes a new key at each start, where only the owner of the run can read it. A host that
proves the key sees the run folder, which all hosts of a learner must share.
"""

import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from slipstream.learner.config import LearnerSettings
from slipstream.learner.layout import Place
from slipstream.weightbus.hosts.membership import HostPlace, Membership
from slipstream.weightbus.net.threads import in_time
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey, read_client_key, write_client_key
from slipstream.wire.files.run_folder import HOSTS_KEY
from slipstream.wire.settings.rendezvous import Address

_CONNECT_S = 1.0
_MISSING = (errno.ENOENT, errno.ESTALE)  # a file that is removed or replaced while it is read


def key_file(settings: LearnerSettings) -> Path:
    """Return the file of the key."""
    return settings.run.folder.resolve() / HOSTS_KEY


def new_key() -> ClientKey:
    """Return a new key for the hosts of a learner."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    return ClientKey(name="learner", role="learner", public=public, secret=secret, broker=public)


@contextmanager
def shown_key(file: Path, key: ClientKey, *, remove_s: float = 5.0) -> Iterator[None]:
    """Show the key of this node 0 to the other nodes while the block runs.

    Its file is removed within ``remove_s``, or stays.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # stays: sandboxes cover it
    write_client_key(file, key)
    newest_key(file)  # refused here already on a file system without modes

    def remove() -> None:
        if newest_key(file) == key:  # else another node 0 has come
            file.unlink(missing_ok=True)

    try:
        yield
    finally:
        with suppress(OSError, ConfigError):  # a file system that hangs does not keep the process
            in_time(remove, remove_s)


def newest_key(file: Path) -> ClientKey | None:
    """Return the key that a node 0 has written; None if there is no file.

    Raises:
        ConfigError: the file is not a key, or others can read it.
    """
    for folder in (file.parents[1], file.parent):
        with suppress(OSError):
            list(folder.iterdir())  # file systems of several hosts look at the folder anew
    try:
        return read_client_key(file, setting="run.dir, whose file system must keep modes")
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _MISSING:
            return None
        raise


def is_listened_at(address: Address | None) -> bool:
    """True if a process listens at an address."""
    if address is None:
        return False
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError:
        return False
    return True


def membership_of(
    settings: LearnerSettings, place: Place, facts: Mapping[str, str], key: ClientKey
) -> Membership:
    """Return what a process brings to the meeting of its learner's hosts.

    Raises:
        ConfigError: the place has no address.
    """
    if place.address is None:
        raise ConfigError("--rendezvous is not set")
    layout, learner = place.layout, settings.learner
    return Membership(
        place=HostPlace(place.node, layout.nodes, layout.ranks_per_node, place.address),
        facts=facts,
        key=key,
        section="learner",
        option="--node",
        refusal="train with",
        advice="start it with --node and the same --rendezvous; it has to see the run folder, with "
        f"{HOSTS_KEY}",
        key_source=str(key_file(settings)),
        rendezvous_timeout_s=learner.rendezvous_timeout_s,
        silence_s=learner.node_silence_s,
        gone_s=30.0,
        difference_ends=True,
    )
