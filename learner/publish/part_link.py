"""The part relay of a host of the learner, kept running by the host's first rank."""

import asyncio
import logging
from collections.abc import Sequence

import zmq

from slipstream.learner.publish.head_door import HeadDoor
from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.relay import ServeHead
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.settings.sections import RunSection, part_name

_log = logging.getLogger(__name__)
_LOOK_S = 1.0


class PartLink:
    """View of the part relay for a thread without a loop."""

    def __init__(
        self, loop: BackgroundLoop, run: RunSection, launch: RelayLaunch, head: HeadDoor
    ) -> None:
        """Prepare to start a relay, which proves a key of its own to the head."""
        run.make_socket_folder()
        self._loop = loop
        self._link = RelayLink(run.endpoint(part_name(launch.part)), launch)
        self._part = launch.part
        self._head = head
        public, secret = zmq.curve_keypair()
        self.public = public.decode()
        """Public key of the relay (Z85)."""
        self._secret = secret.decode()

    def open(
        self, paths: Sequence[str], layout: WeightManifest, *, epoch: int, run_id: str
    ) -> None:
        """Start the relay on the memory of this host's part."""
        loop = self._loop
        loop.start(self._link.run())
        opening = self._link.open(paths, layout, epoch=epoch, run_id=run_id, part=self._part)
        loop.run(opening)
        loop.start(self._follow(epoch))

    def writing(self, slot: int) -> None:
        """Have the relay serve nothing from a slot about to be written."""
        self._loop.check()
        self._loop.run(self._link.writing(slot))

    def written(self, version: PolicyVersion, slot: int) -> None:
        """Hand over this part of a version."""
        self._loop.run(self._link.written(version, slot))

    def end(self) -> None:
        """Stop the relay: no version will follow."""
        self._loop.run(self._link.end())

    async def _follow(self, epoch: int) -> None:
        """Pass every new head's address to the relay, until cancelled."""
        while True:
            try:
                door = await asyncio.to_thread(self._head.read)
            except PublishError as error:
                _log.warning("%s", error)
                return
            if door is not None:
                head = ServeHead(epoch=epoch, head=door, public=self.public, secret=self._secret)
                await self._link.serve_head(head)
            await asyncio.sleep(_LOOK_S)
