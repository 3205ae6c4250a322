"""Uploads checkpoints during training, in a thread of rank 0.

Training never waits for uploads: a failure is logged, counted, retried a few times, and once more
with the next checkpoint. At its end the learner waits for the last upload.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.learner.checkpoints.retention import Resumption, to_remove
from slipstream.learner.config import LearnerSettings
from slipstream.wire.errors import SlipstreamError
from slipstream.wire.files.checkpoints import UPLOAD_FILE, CheckpointInfo, UploadState
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints, refuse_other_run
from slipstream.wire.files.replace import replace_file
from slipstream.wire.process.patience import Patience, signs_of

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
_PAUSE_S = 2.0  # pause after the first failure; doubled after each further one
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Checkpoints of the run folder that remote storage is to have."""

    infos: Mapping[Path, CheckpointInfo]
    resumption: Resumption | None


class Uploader:
    """Mirrors the run folder's checkpoints to remote storage, by the same rule of retention."""

    def __init__(
        self, settings: LearnerSettings, run_id: str, *, pause_s: float = _PAUSE_S
    ) -> None:
        """Start the thread; it sends no request before there is a checkpoint.

        Raises:
            ConfigError: checkpoint.upload cannot be used.
        """
        self._settings = settings
        self._run_id = run_id
        self._pause_s = pause_s
        self._remote = RemoteCheckpoints(settings.checkpoint.upload)
        self._state = UploadState(url=settings.checkpoint.upload)
        self._changed = threading.Condition()
        self._wanted: _Wanted | None = None  # offer that the thread has not taken yet
        self._is_idle = True
        self._is_closing = False
        self.num_polls = 0  # polls by ``close``
        self._note()
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def offer(self, infos: Mapping[Path, CheckpointInfo], resumption: Resumption | None) -> None:
        """Have the run folder's checkpoints uploaded, in place of those offered before."""
        with self._changed:
            self._wanted = _Wanted(dict(infos), resumption)
            self._is_idle = False
            self._changed.notify()

    def figures(self) -> dict[str, float]:
        """Return the failures so far and the newest uploaded step, for a step's metrics."""
        state = self._state
        return {
            "checkpoint/upload_failed": float(state.num_failed),
            "checkpoint/uploaded_step": float(state.step),
        }

    def close(self) -> None:
        """Wait until the upload of the newest checkpoint has succeeded or failed."""
        limit_s = self._settings.learner.timeout_s
        patience = Patience("uploads to end", limit_s, signs_of(lambda: [os.getpid()]))
        while not self._is_idle and self._thread.is_alive() and not patience.is_over():
            self.num_polls += 1
            time.sleep(_POLL_S)
        if not self._is_idle:
            _log.error("the upload to %s %s and is given up", self._remote.url, patience.why)
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def _work(self) -> None:
        while (wanted := self._next()) is not None:
            self._attempt(wanted)
            with self._changed:
                self._is_idle = self._wanted is None

    def _next(self) -> _Wanted | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is not None or self._is_closing)
            wanted, self._wanted = self._wanted, None
            return wanted

    def _attempt(self, wanted: _Wanted) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._mirror(wanted)
            except (SlipstreamError, OSError) as error:
                self._note(num_failed=self._state.num_failed + 1, error=str(error))
                _log.error("checkpoints are not uploaded (%d): %s", attempt, error)
            else:
                return
            pause_s = self._pause_s * 2 ** (attempt - 1) if attempt < _ATTEMPTS else 0.0
            with self._changed:
                if self._changed.wait_for(lambda: self._wanted is not None, pause_s):
                    return  # a newer checkpoint: all is tried again

    def _mirror(self, wanted: _Wanted) -> None:
        known = self._remote.known()
        refuse_other_run(known, self._run_id, self._remote.url)
        there = {uploaded.version: uploaded for uploaded in known}
        newest_first = sorted(wanted.infos.items(), key=lambda item: item[1].version, reverse=True)
        for path, info in newest_first:
            if info.version not in there and not path.is_dir():
                continue  # removed from the run folder since
            started = time.monotonic()
            there[info.version] = self._remote.upload(path, info, there.get(info.version))
            if there[info.version] not in known:
                _log.info("uploaded %s in %.1f s", path.name, time.monotonic() - started)
        if newest_first:
            self._note(step=newest_first[0][1].step, error="")
        checkpoint, evaluation = self._settings.checkpoint, self._settings.eval
        infos = [uploaded.info for uploaded in there.values()]
        for info in to_remove(infos, checkpoint, evaluation, resumption=wanted.resumption):
            self._remote.remove(there[info.version])

    def _note(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        try:
            data = msgspec.json.encode(self._state)
            replace_file(self._settings.run.checkpoints / UPLOAD_FILE, data, durable=False)
        except OSError as error:
            _log.warning("cannot write %s: %s", UPLOAD_FILE, error)
