"""How far a warm-up is: policy, optimizer and random numbers after some number of updates.

OUT.progress/ holds ``inputs.json``, which records the inputs of the warm-up, and one
checkpoint. A checkpoint appears whole (learner/checkpoints/files.py), and what belongs to other
inputs is removed before they are written down: whatever is read there belongs together.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from slipstream.learner.checkpoints.files import Save, prepare_folder
from slipstream.learner.checkpoints.identity import architecture_of, dtype_name, parameters_hash
from slipstream.learner.checkpoints.loading import load_checkpoint
from slipstream.learner.model.topology import Topology
from slipstream.learner.training.policy import Policy
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import FORMAT_REVISION, CheckpointInfo, readable_checkpoints
from slipstream.wire.messages.versions import PolicyVersion

_log = logging.getLogger(__name__)
_INPUTS = "inputs.json"
_RECIPE = "recipe (another version)"


def digests(files: Mapping[str, Sequence[Path]], recipe: bytes) -> dict[str, str]:
    """Return what a warm-up is made of: a hash by option, and one of how it trains.

    Raises:
        ConfigError: a file cannot be read.
    """
    found = {_RECIPE: hashlib.sha256(recipe).hexdigest()}
    for option, paths in files.items():
        digest = hashlib.sha256()
        for path in paths:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror} ({option})") from error
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        found[option] = digest.hexdigest()
    return found


class Progress:
    """The progress beside a folder that a warm-up is to write."""

    def __init__(self, out: Path, inputs: Mapping[str, str], topology: Topology) -> None:
        """Name the place beside ``out``, to be written; ``inputs`` are from ``digests``."""
        self.folder = out.with_name(f"{out.name}.progress")
        self._out = out
        self._inputs = dict(inputs)
        self._topology = topology

    def resume(self, build: Callable[[], Policy]) -> tuple[Policy, int]:
        """Return the policy to continue with, and its number of updates so far.

        Without progress it is what ``build`` makes: the policy before its first update.

        Raises:
            ConfigError: the folder cannot be written.
        """
        if not self._is_ours():
            try:
                if self.folder.exists():
                    shutil.rmtree(self.folder)
                self.folder.mkdir(parents=True)
                unfinished = self.folder / f".{_INPUTS}"
                unfinished.write_bytes(msgspec.json.encode(self._inputs))
                unfinished.replace(self.folder / _INPUTS)
            except OSError as error:
                raise self._cannot_write(error.strerror) from error
        try:
            prepare_folder(self.folder)
        except ConfigError as error:
            raise self._cannot_write(error) from error
        infos = readable_checkpoints(self.folder)
        for path in sorted(infos, key=lambda path: infos[path].step, reverse=True):
            policy = build()  # anew each time: what cannot be read may have been read in part
            try:
                load_checkpoint(policy, self._topology, path, infos[path])
            except ConfigError as error:
                _log.error("%s is passed over: %s", path, error)
            else:
                _log.info("resuming from %d updates in %s", infos[path].step, self.folder)
                return policy, infos[path].step
        return build(), 0

    def keep(self, policy: Policy, updates: int) -> None:
        """Write down the policy after so many updates, in place of what was kept before.

        Raises:
            CheckpointError: it cannot be written; what was kept before still is.
        """
        info = CheckpointInfo(
            format_revision=FORMAT_REVISION,
            run_name=f"warm-up of {self._out.name}",
            version=PolicyVersion(1, updates),
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=str(self._out.resolve()),
            architecture=architecture_of(policy.model.hf_config),
            parameters=parameters_hash(policy.model),
            dtype=dtype_name(policy.model),
            ranks=self._topology.world_size,
            tensor_parallel=self._topology.sizes.tensor,
            packages={},
        )
        save = Save(policy, self._topology, self.folder, info, lambda: b"", timeout_s=900.0)
        save.wait()
        for path in self.folder.glob("step-*"):
            if path != save.path:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Forget the progress: the policy is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self) -> bool:
        """True if the folder was made with the same inputs; logs it if not."""
        file = self.folder / _INPUTS
        try:
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError) as error:
            _log.error("%s is ignored, starting over: %s", file, error)
            return False
        names = sorted(self._inputs.keys() | found.keys())
        other = [name for name in names if self._inputs.get(name) != found.get(name)]
        if other:
            _log.info("%s was made with another %s: starting over", self.folder, ", ".join(other))
        return not other

    def _cannot_write(self, reason: object) -> ConfigError:
        return ConfigError(f"cannot keep the progress in {self.folder}: {reason} (--out)")
