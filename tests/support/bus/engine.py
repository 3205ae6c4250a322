"""An engine of plain tensors that keeps the promises of a real one, to be broken on purpose.

It generates all the time: a token is the version that the engine claims to run together with a
digest of the weights that it holds, written to a log. Whatever happens to a publish, no label may
ever be beside two digests.
"""

import asyncio
import datetime
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.generators.sglang.weight_shadow import Weights, WeightShadow
from slipstream.generators.versions.shadow_state import Readiness
from slipstream.weightbus.agent.engine import Adoption
from slipstream.weightbus.net import groups
from slipstream.weightbus.version import engine_checksums
from slipstream.weightbus.version.engine_checksums import expected_checksums
from slipstream.weightbus.version.mapped_file import watched
from slipstream.wire.errors import EngineError, PublishError
from slipstream.wire.messages.manifest import Bucket
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.engine_steps import EngineInSteps


class BusEngine(EngineInSteps):
    """Tensors by name, and a log of tokens."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        *,
        log: Path,
        group_timeout_s: float,
        fault: Callable[[str], None] = lambda _step: None,
        token_s: float = 0.005,
        has_shadow: bool = False,
    ) -> None:
        """Hold weights and generate.

        Args:
            tensors: initial weights; nothing is generated before a version is committed.
            log: where tokens go.
            group_timeout_s: of collectives.
            fault: is called with the name of every step, and may raise, hang or end the process.
            token_s: seconds per token.
            has_shadow: True loads versions next to the live weights.
        """
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.num_paused = 0
        self.loads_wrongly = ""  # name of a tensor
        self.arrives: dict[str, Tensor] | None = None  # in place of what a group brings
        self._log = log.open("a")
        self._timeout_s = group_timeout_s
        self._fault = fault
        self._token_s = token_s
        self._label = ""
        self._runs = False
        self._is_open = False
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._staged: PolicyVersion | None = None
        self._shadow: WeightShadow | None = None
        if has_shadow:
            self._live = _Held(self.tensors)
            self._shadow = WeightShadow(
                self._live, self._load_shadow, expected_of, device=torch.device("cpu")
            )

    @property
    def runs(self) -> bool:
        """True while it generates."""
        return self._runs

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    async def generate(self) -> None:
        """Write tokens until cancelled."""
        while True:
            await asyncio.sleep(self._token_s)
            if self._runs and self._label:
                self._log.write(f"{self._label} {digest_of(self.tensors)}\n")
                self._log.flush()

    async def open_group(
        self, *, host: str, port: int, group_name: str, rank: int, world_size: int, backend: str
    ) -> None:
        self._fault("open_group")
        assert backend == "gloo"

        def join() -> dist.ProcessGroup:
            store = TCPStore(
                host, port, is_master=False, timeout=datetime.timedelta(seconds=self._timeout_s)
            )
            group = groups.open_group(
                backend,
                store,
                name=group_name,
                rank=rank,
                world_size=world_size,
                timeout_s=self._timeout_s,
            )
            groups.pass_first_byte(group, torch.device("cpu"), timeout_s=self._timeout_s)
            return group

        try:
            self._groups[group_name] = await asyncio.to_thread(join)
        except (RuntimeError, PublishError) as error:
            raise EngineError(str(error)) from error

    async def close_group(self, group_name: str) -> None:
        self._is_open = False
        if (group := self._groups.pop(group_name, None)) is not None:
            groups.release(group)

    async def pause(self) -> int:
        self._fault("pause")
        self._runs = False
        self.num_paused += 1
        return 1 if self._label else 0

    async def begin_update(self) -> None:
        if self._is_open:
            raise EngineError("an update is open")
        self._is_open = True

    async def load_bucket(self, bucket: Bucket, *, group_name: str, last: bool) -> None:
        assert self._is_open
        assert not self._runs, "a mixture would be generated"
        self._fault("before_bucket")
        if self.arrives is not None:
            self.tensors |= {spec.name: self.arrives[spec.name] for spec in bucket.tensors}
            return
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)

        def receive() -> None:
            groups.broadcast(flat, self._groups[group_name], timeout_s=self._timeout_s)

        try:
            await asyncio.to_thread(receive)
        except (RuntimeError, PublishError) as error:
            raise EngineError(f"broadcast failed: {error}") from error
        at = 0
        for index, spec in enumerate(bucket.tensors):
            part = flat[at : at + spec.num_bytes]
            self.tensors[spec.name] = part.view(getattr(torch, spec.dtype)).view(spec.shape).clone()
            at += spec.num_bytes
            if index == 0:
                self._fault("in_bucket")  # one tensor of it is in
        del last

    async def end_update(self) -> None:
        self._is_open = False

    async def load_folder(self, folder: Path) -> None:
        assert not self._runs
        assert not self._is_open, "an update that a collective left open"
        self._fault("before_folder")
        with watched(folder, folder.name) as difference:
            if why := difference():
                raise EngineError(why)
            loaded = load_file(folder / "model.safetensors")
            for index, (name, tensor) in enumerate(loaded.items()):
                self.tensors[name] = tensor.clone()
                if name == self.loads_wrongly:
                    self.tensors[name].zero_()
                if index == 0:
                    self._fault("in_folder")
            if why := difference():
                raise EngineError(why)

    def _load_shadow(self, twin: nn.Module, weights: Weights) -> None:
        for index, (name, tensor) in enumerate(weights):
            twin._parameters[name].data.copy_(tensor)  # type: ignore[union-attr]
            if index == 0:
                self._fault("in_stage")

    async def stage_folder(self, folder: Path, version: PolicyVersion) -> dict[str, float]:
        self._staged = None
        if self._shadow is None:
            return {}
        while (  # noqa: ASYNC110 a thread loads it
            step := self._shadow.ask(folder, version.label)
        ).readiness is Readiness.LOADING:
            await asyncio.sleep(0.002)
        if step.readiness is Readiness.FAILED:
            raise EngineError(step.why.removeprefix("EngineError: "))
        self._staged = version
        return {"stage": 0.0}

    async def adopt_folder(self, folder: Path, version: PolicyVersion, *, digest: str) -> Adoption:
        is_staged, self._staged = self._staged == version, None
        if not is_staged or self._shadow is None or self._shadow.loaded is None:
            return await super().adopt_folder(folder, version, digest=digest)
        checksums = self._shadow.loaded.checksums
        if digest and engine_checksums.digest_of(checksums) != digest:
            self._shadow.forget()
            return Adoption(1, {}, checksums)
        num_in_flight = await self.pause()
        for name in list(self.tensors)[:1]:  # a copy that fails midway
            self.tensors[name] = self._shadow._twins.twin._parameters[name].detach().clone()  # type: ignore[union-attr]
            self._fault("in_copy")
        self._shadow.adopt(version.label)
        self.tensors = {name: held.detach().clone() for name, held in self._live.weights().items()}
        await self.label(version)
        await self.resume()
        return Adoption(num_in_flight, {"load": 0.0})

    async def checksums(self) -> dict[str, str]:
        self._fault("checksums")
        return expected_checksums(self.tensors)

    async def label(self, version: PolicyVersion) -> None:
        self._fault("label")
        self._label = version.label

    async def resume(self) -> None:
        self._fault("resume")
        self._runs = True


class _Held(nn.Module):
    """Weights with dots in their names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self._parameters[name] = nn.Parameter(tensor.clone(), requires_grad=False)

    def weights(self) -> dict[str, Tensor]:
        return {name: held for name, held in self._parameters.items() if held is not None}


def expected_of(held: nn.Module) -> dict[str, str]:
    """Return the checksums of held weights."""
    assert isinstance(held, _Held)
    return expected_checksums(held.weights())


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Return a digest of all tensors."""
    digest = xxhash.xxh3_64()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokens_in(log: Path) -> list[tuple[str, str]]:
    """Return the tokens written so far: label and digest."""
    if not log.exists():
        return []
    lines = log.read_text().splitlines()
    return [(label, digest) for label, digest in (line.split() for line in lines if " " in line)]


def random_tensors(*, seed: int, count: int = 12, size: int = 4096) -> dict[str, Tensor]:
    """Return tensors of a model that never was; each takes 4 * ``size`` bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.norm.weight": torch.randn(size, generator=generator)
        for i in range(count)
    }
