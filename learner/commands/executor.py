"""Carries out commands on one rank, and keeps what must survive it in files.

Every rank calls every method with the same arguments. Rank 0 alone reads and writes files.
"""

import hashlib
import logging
import os
from math import isfinite
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save

from slipstream.learner.commands.passes import TenantPasses
from slipstream.learner.commands.tenant_model import TenantModel, read_state
from slipstream.learner.config import LearnerSettings
from slipstream.learner.model.collectives import broadcast_bytes
from slipstream.learner.model.topology import Topology
from slipstream.learner.starting_policy import FrozenBase
from slipstream.wire.files.replace import replace_file, replacing_folder
from slipstream.wire.messages.commands import (
    CommandFailed,
    CreateModel,
    Forward,
    LoadWeights,
    LoraSpec,
    Made,
    Operation,
    OptimStep,
    Outcome,
    Saved,
    SaveWeights,
    Stepped,
)
from slipstream.wire.models.adapters import CONFIG, TENSORS, AdapterFacts, adapter_config
from slipstream.wire.settings.serve import ServedPlaces

_log = logging.getLogger(__name__)
_WEIGHTS = ("weights",)


class Executor:
    """The models of all tenants on this rank."""

    def __init__(self, settings: LearnerSettings, topology: Topology) -> None:
        """Load the base model, and every model's durable state.

        Raises:
            ConfigError: no tenant can have adapters of lora.targets.
        """
        self._base = FrozenBase.load(settings, topology)
        self._leads = topology.rank == 0
        self._places = ServedPlaces(settings.run)
        self._passes = TenantPasses(
            self._base.model, topology, max_tokens=settings.learner.max_tokens_per_microbatch
        )
        self.models: dict[str, TenantModel] = {}
        lora = settings.lora.facts()  # refused at the start, and not at a tenant's first command
        TenantModel(self._base.model, LoraSpec(rank=1, alpha=1.0, targets=lora.targets))
        self._load_states()

    @property
    def at(self) -> dict[str, int]:
        """The last command that each model has carried out."""
        return {name: model.at for name, model in self.models.items()}

    def keep_only(self, models: set[str]) -> None:
        """Forget models that have ended, with their states."""
        for name in self.models.keys() - models:
            _log.info("%s has ended", name)
            del self.models[name]
            if self._leads:
                self._places.state(name).unlink(missing_ok=True)

    def pass_by(self, model: str, number: int) -> None:
        """Note a command for which nothing is left to do."""
        if model in self.models:
            self.models[model].at = number

    def carry_out(self, model: str, number: int, operation: Operation) -> Outcome:
        """Carry out a command; return its outcome.

        The durable state holds it when this returns, if it changes weights or optimizer.
        """
        tenant = self.models.get(model)
        match operation:
            case CreateModel(spec=spec):
                self.models[model] = tenant = self._made(spec)
                return self._kept(model, tenant, number, Made())
            case LoadWeights():
                return self._loaded(model, number, operation)
        if tenant is None:
            return CommandFailed(reason=f"{model} is not there", category="server")
        tenant.attach()
        outcome: Outcome
        match operation:
            case Forward():
                outcome = self._passes.run(operation)
                loss = outcome.metrics["loss:sum"]
                if not isfinite(loss):
                    tenant.forget_last_gradients()
                    reason = f"the loss is not finite ({loss}): it adds no gradient"
                    outcome = CommandFailed(reason=reason, category="user")
                elif operation.backward:
                    tenant.add_gradients()
            case OptimStep():
                norm = tenant.step(operation)
                outcome = Stepped(metrics={"grad_norm": norm})
                if not isfinite(norm):
                    reason = f"the gradient is not finite ({norm}): nothing was changed"
                    outcome = CommandFailed(reason=reason, category="user")
                return self._kept(model, tenant, number, outcome)
            case SaveWeights(kind=kind):
                outcome = self._saved(tenant, kind)
        tenant.at = number
        return outcome

    # ---- parts ---------------------------------------------------------------------------------

    def _made(self, spec: LoraSpec) -> TenantModel:
        return TenantModel(self._base.model, spec)

    def _kept(self, model: str, tenant: TenantModel, number: int, outcome: Outcome) -> Outcome:
        """Write the state after a command, with its number and outcome; return the outcome."""
        tenant.at = tenant.applied = number
        tenant.outcome = outcome
        data = tenant.state_file(tenant.facts(is_own=True, model=model))
        if self._leads:
            replace_file(self._places.state(model), data, mode=0o600)
        return outcome

    def _loaded(self, model: str, number: int, load: LoadWeights) -> Outcome:
        data = self._read(self._places.checkpoint(load.digest))
        tenant = self.models.get(model) or self._made(load.spec)
        try:
            facts, tensors = read_state(data, load.digest)
            tenant.load(tensors, facts, optimizer=load.with_optimizer)
        except (ValueError, KeyError, SafetensorError) as error:
            reason = f"the weights cannot be loaded: {error}"
            if number == 0:
                return CommandFailed(reason=reason, category="server")
            return self._kept(
                model, tenant, number, CommandFailed(reason=reason, category="server")
            )
        self.models[model] = tenant
        return self._kept(model, tenant, number, Made())

    def _saved(self, tenant: TenantModel, kind: str) -> Saved:
        if kind == "training":
            data = tenant.state_file(tenant.facts(is_own=False))
            digest = hashlib.sha256(data).hexdigest()
            if self._leads:
                replace_file(self._places.checkpoint(digest), data, mode=0o600)
            return Saved(digest=digest, num_bytes=len(data))
        spec = tenant.spec
        dtype = self._base.model.config.params_dtype
        tensors = {
            name.partition("/")[2]: tensor.to(dtype)
            for name, tensor in tenant.whole(_WEIGHTS).items()
        }
        data = save(tensors, metadata={"format": "pt"})
        facts = AdapterFacts(rank=spec.rank, alpha=spec.alpha, targets=spec.targets)
        config = adapter_config(facts, "")  # a model's place is no part of what a version is
        digest = hashlib.sha256(config + data).hexdigest()
        folder = self._places.version(digest)
        if self._leads and folder.is_dir():
            os.utime(folder)  # it is in use again, and not removed as an old one
        elif self._leads:
            with replacing_folder(folder, mode=0o700) as unfinished:
                (unfinished / CONFIG).write_bytes(config)
                (unfinished / TENSORS).write_bytes(data)
        return Saved(digest=digest, num_bytes=len(data))

    # ---- states --------------------------------------------------------------------------------

    def _load_states(self) -> None:
        paths = sorted(self._places.states.glob("*.state")) if self._leads else []
        count = int(broadcast_bytes(str(len(paths)).encode()))
        for number in range(count):
            path = paths[number] if self._leads else None
            data = self._read(path)
            try:
                facts, tensors = read_state(data)
                tenant = self._made(facts.spec)
                tenant.load(tensors, facts, optimizer=True)
            except (ValueError, TypeError, KeyError, SafetensorError) as error:
                _log.error("%s cannot be read, and its model ends: %s", path, error)
                continue
            tenant.at = tenant.applied = facts.applied
            tenant.outcome = facts.outcome
            self.models[facts.model] = tenant

    def _read(self, path: Path | None) -> bytes:
        """Return a file's bytes on every rank; none if there is no such file."""
        data: bytes | None = None
        if self._leads and path is not None:
            try:
                data = path.read_bytes()
            except OSError as error:
                _log.error("%s", error)
                data = b""
        return broadcast_bytes(data)
