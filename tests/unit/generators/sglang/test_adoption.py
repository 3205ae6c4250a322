"""The order that SGLang's scheduler carries out, at a scheduler of the test's own."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace as Answer
from typing import Any

import msgspec
import pytest

from slipstream.generators.sglang.adoption import (
    RECEIVED_VARIABLE,
    AdoptionAnswer,
    AdoptionOrder,
    adopt_in_scheduler,
    folder_to_load,
    load_whole_versions,
)
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_files import WEIGHTS

ORDER = AdoptionOrder(steps=("load",), version="v1.2", pause="retract", digest="", num_ranks=1)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module as SGLang's, whose manager answers with the path that it loads."""
    messages = types.ModuleType("messages_of_a_test")
    monkeypatch.setitem(sys.modules, "messages_of_a_test", messages)
    request = type("CheckWeightsReqInput", (), {"__module__": "messages_of_a_test"})

    class Output(Answer):
        pass

    vars(messages)["UpdateWeightFromDiskReqOutput"] = Output

    class Manager:
        def __init__(self) -> None:
            self.loaded: list[str] = []

        def update_weights_from_disk(self, recv_req: Any) -> Any:  # noqa: ANN401
            self.loaded.append(recv_req.model_path)
            return Output(success=True, message="")

    found = types.ModuleType("weight_updater")
    vars(found).update(SchedulerWeightUpdaterManager=Manager, CheckWeightsReqInput=request)
    return found


def loaded_by(module: types.ModuleType, named: Path) -> list[str]:
    adopt_in_scheduler(module)
    manager = module.SchedulerWeightUpdaterManager()
    order = Answer(manifest=msgspec.to_builtins(ORDER), model_path=str(named))
    output = manager.update_weights_from_disk(order)
    assert AdoptionAnswer.read(output.message).version == "v1.2"
    manager.update_weights_from_disk(Answer(manifest=None, model_path=str(named)))
    found: list[str] = manager.loaded
    return found


def test_ranks_load_the_folder_of_their_order(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv(RECEIVED_VARIABLE, raising=False)
    assert loaded_by(module, tmp_path) == [str(tmp_path)] * 2


def test_ranks_on_another_host_load_that_version_from_what_their_host_received(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    own = tmp_path / "v1.2"
    own.mkdir()
    monkeypatch.setenv(RECEIVED_VARIABLE, str(tmp_path))
    assert loaded_by(module, Path("/of/node/0/v1.2")) == [str(own)] * 2


@pytest.mark.parametrize("is_of_another_host", [False, True])
def test_ranks_find_no_weights_where_their_host_does_not_have_the_version(
    tmp_path: Path, is_of_another_host: bool
):
    (tmp_path / "v1.3").mkdir()
    named, received = ("/of/node/0", str(tmp_path)) if is_of_another_host else (tmp_path, "")
    assert folder_to_load(f"{named}/v1.2", received) == str(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("when", ["before", "within", "never"])
def test_a_rank_refuses_the_learners_memory_if_it_was_overwritten_before_the_load_ended(
    module: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    when: str,
    is_hidden: bool,
):
    monkeypatch.delenv(RECEIVED_VARIABLE, raising=False)
    memory = SharedSlots.make(
        plan_layout([TensorSpec("w", "float32", (25,))], bucket_bytes=100), num_slots=1
    )
    memory.label(0, PolicyVersion(1, 2) if when != "before" else PolicyVersion(1, 5))
    (tmp_path / WEIGHTS).symlink_to(memory.paths[0])
    load = module.SchedulerWeightUpdaterManager.update_weights_from_disk

    def overwritten(self: Any, recv_req: Any) -> Any:  # noqa: ANN401
        if when == "within":
            memory.label(0, None)
        if is_hidden:
            (tmp_path / WEIGHTS).unlink()
        return load(self, recv_req)

    monkeypatch.setattr(
        module.SchedulerWeightUpdaterManager, "update_weights_from_disk", overwritten
    )
    load_whole_versions(module)
    adopt_in_scheduler(module)
    manager = module.SchedulerWeightUpdaterManager()
    order = Answer(manifest=msgspec.to_builtins(ORDER), model_path=str(tmp_path))
    output = manager.update_weights_from_disk(order)
    assert output.success == (when == "never")
    assert len(manager.loaded) == (when != "before")
    if not output.success:
        assert output.message.startswith("load: the memory holds ")
    memory.close()
