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
)

ORDER = AdoptionOrder(steps=("load",), version="v1.2", pause="retract", digest="", num_ranks=2)


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
