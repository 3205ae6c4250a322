"""A second copy of a model's weights, on a CPU as the device."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.generators.sglang.weight_shadow import MappedFiles, Twins, WeightShadow
from slipstream.generators.versions.shadow_state import Readiness
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_files import WEIGHTS
from tests.support.waiting import until

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A layer as SGLang's: a loader of its own, and a tensor that it derives of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)
        self.weight.loader = self.load  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.register_buffer("gemma_weight", 1 + self.weight.detach(), persistent=False)
        self.doubled = 2 * self.weight.detach()
        self.seen = torch.zeros(3)  # SGLang's own use, which changes while it generates

    def load(self, weight: Tensor, loaded: Tensor) -> None:
        weight.data.copy_(loaded)
        self.doubled.copy_(2 * loaded)
        self.gemma_weight.copy_(1 + loaded)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(), Layer()
        self.last.weight = self.first.weight  # tied
        self.other = Layer()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, loaded in weights:
            own[name].loader(own[name], loaded)  # type: ignore[attr-defined]


def state_of(model: nn.Module) -> dict[str, list[float]]:
    tensors = model.state_dict()
    for name, module in model.named_modules():
        if name:
            tensors |= {f"{name}.doubled": module.doubled, f"{name}.plus": module.gemma_weight}
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def shadow(model: Model) -> WeightShadow:
    return WeightShadow(
        model,
        lambda twin, weights: twin.load_weights(weights),  # type: ignore[operator]
        lambda twin: float(twin.first.weight.sum()),  # type: ignore[union-attr, operator]
        device=CPU,
    )


def version_in(folder: Path, value: float, **other: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {"first.weight": torch.full((3, 4), value), "other.weight": torch.zeros(3, 4)}
    save_file({**tensors, **other}, folder / WEIGHTS)
    return folder


def answered(shadow: WeightShadow, folder: Path, version: str) -> tuple[Readiness, str]:
    steps = []

    def is_there() -> bool:
        steps.append(shadow.ask(folder, version))
        return steps[-1].readiness is not Readiness.LOADING

    until(is_there, "the load does not end")
    return steps[-1].readiness, steps[-1].why


def test_a_version_is_loaded_beside_the_live_weights_and_adopted_by_a_copy(
    model: Model, shadow: WeightShadow, tmp_path: Path
):
    before, places = state_of(model), [weight.data_ptr() for weight in model.parameters()]
    assert answered(shadow, version_in(tmp_path, 7.0), "v1.1") == (Readiness.READY, "")
    assert state_of(model) == before, "the live weights were touched"
    assert shadow.loaded is not None
    assert shadow.loaded.checksums == 84.0, "of the shadow"
    model.first.seen += 5
    shadow.adopt("v1.1")
    assert model.first.seen.tolist() == [5.0] * 3
    assert model.first.weight.unique().tolist() == [7.0]
    assert model.last.weight is model.first.weight
    derived = model.first.doubled.unique().tolist() + model.first.gemma_weight.unique().tolist()
    assert derived == [14.0, 8.0], "what is derived was left behind"
    assert model.other.weight.unique().tolist() == [0.0]
    assert [weight.data_ptr() for weight in model.parameters()] == places, "graphs read there"


def test_twins_share_nothing_that_a_load_changes(model: Model):
    twin = Twins(model).twin
    assert isinstance(twin, Model)
    assert twin.last.weight is twin.first.weight
    assert twin.first.weight.loader.__self__ is twin.first  # type: ignore[attr-defined]
    assert twin.first.angles is model.first.angles, "no version changes these"
    own = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    assert own.isdisjoint(id(tensor) for tensor in twin.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("damage", ["cut off", "no header", "no file", "another shape", "unknown"])
def test_a_load_that_fails_leaves_the_live_weights_and_cannot_be_adopted(
    model: Model, shadow: WeightShadow, tmp_path: Path, damage: str
):
    folder, before = version_in(tmp_path, 7.0), state_of(model)
    file = folder / WEIGHTS
    match damage:
        case "cut off":
            file.write_bytes(file.read_bytes()[:-1])
        case "no header":
            file.write_bytes(b"not safetensors")
        case "no file":
            file.unlink()
        case "another shape":
            version_in(folder, 7.0, **{"other.weight": torch.ones(5)})
        case "unknown":
            version_in(folder, 7.0, another=torch.ones(5))
    readiness, why = answered(shadow, folder, "v1.1")
    assert (readiness, bool(why)) == (Readiness.FAILED, True)
    with pytest.raises(PublishError, match=r"not v1\.1"):
        shadow.adopt("v1.1")
    assert state_of(model) == before
    assert answered(shadow, version_in(tmp_path, 8.0), "v1.1") == (Readiness.READY, "")


def test_a_load_that_fails_without_a_word_has_failed(model: Model, tmp_path: Path):
    def load(_twin: nn.Module, _weights: Iterable[tuple[str, Tensor]]) -> None:
        raise AssertionError

    shadow = WeightShadow(model, load, lambda _: None, device=CPU)
    assert answered(shadow, version_in(tmp_path, 7.0), "v1.1")[0] is Readiness.FAILED
    with pytest.raises(PublishError):
        shadow.check("v1.1")


def test_what_is_forgotten_is_loaded_again(shadow: WeightShadow, tmp_path: Path):
    assert answered(shadow, version_in(tmp_path, 7.0), "v1.1")[0] is Readiness.READY
    shadow.forget()
    with pytest.raises(PublishError, match=r"holds nothing, not v1\.1"):
        shadow.check("v1.1")
    assert shadow.ask(tmp_path, "v1.1").begins


@pytest.mark.parametrize("when", ["before", "within"])
def test_memory_that_the_learner_overwrites_is_no_version(model: Model, tmp_path: Path, when: str):
    specs = [TensorSpec(name, "float32", (3, 4)) for name in ("first.weight", "other.weight")]
    memory = SharedSlots.make(plan_layout(specs, bucket_bytes=1 << 20), num_slots=1)
    with memory.writing(0, PolicyVersion(1, 1)) as slot:
        slot.view(torch.float32).fill_(7.0)
    (tmp_path / WEIGHTS).symlink_to(memory.paths[0])
    if when == "before":
        memory.label(0, None)

    def load(twin: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        twin.load_weights(weights)  # type: ignore[operator]
        memory.label(0, None)

    shadow = WeightShadow(model, load, lambda _: None, device=CPU)
    readiness, why = answered(shadow, tmp_path, "v1.1")
    assert readiness is Readiness.FAILED
    assert why.startswith("the memory holds a part of another version")
    memory.close()


def test_another_version_ends_a_load_and_waits_until_it_writes_no_more(
    model: Model, tmp_path: Path
):
    blocks, begun = threading.Event(), []

    def load(twin: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        begun.append(1)
        twin.load_weights((next(iter(weights)),))  # type: ignore[operator]
        if len(begun) == 1:
            blocks.wait(60)
        twin.load_weights(weights)  # type: ignore[operator]

    shadow = WeightShadow(model, load, lambda _: None, device=CPU)
    old, new = version_in(tmp_path / "old", 5.0), version_in(tmp_path / "new", 6.0)
    assert shadow.ask(old, "v1.1").begins
    until(lambda: begun, "no load began")
    assert shadow.ask(new, "v1.2").readiness is Readiness.LOADING
    assert len(begun) == 1, "two loads write at a time"
    blocks.set()
    assert answered(shadow, new, "v1.2") == (Readiness.READY, "")
    with pytest.raises(PublishError, match=r"holds all of v1\.2, not v1\.1"):
        shadow.adopt("v1.1")
    shadow.adopt("v1.2")
    assert model.first.weight.unique().tolist() == [6.0]


def test_weights_of_another_shape_are_not_copied_at_all(model: Model):
    twins = Twins(model)
    assert isinstance(twins.twin, Model)
    twins.twin.first.weight.data.fill_(5.0)
    twins.twin.other.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(PublishError, match="Layer has other weights in its twin"):
        twins.copy()
    assert model.first.weight.unique().tolist() == [1.0]


def test_memory_of_a_slot_is_pinned_once_and_unpinned_when_others_have_replaced_it(tmp_path: Path):
    pinned: dict[int, int] = {}
    log: list[str] = []

    def register(address: int, num_bytes: int) -> int:
        log.append("pinned")
        pinned[address] = num_bytes
        return 0

    def unregister(address: int) -> None:
        log.append("unpinned")
        del pinned[address]

    files = MappedFiles(pins=True, register=register, unregister=unregister)
    layout = plan_layout([TensorSpec("w", "float32", (3, 4))], bucket_bytes=100)
    memory, another = (SharedSlots.make(layout, num_slots=3) for _ in range(2))
    for slot in (*memory.paths, *memory.paths):
        dict(files.tensors(Path(slot)))
    assert log == ["pinned"] * 3
    assert set(pinned.values()) == {Path(memory.paths[0]).stat().st_size}
    dict(files.tensors(Path(another.paths[0])))  # memory of a learner that was started again
    assert log == [*["pinned"] * 4, "unpinned"]
    dict(files.tensors(version_in(tmp_path, 1.0) / WEIGHTS))
    assert log == [*["pinned"] * 4, "unpinned"], "a file on a disk stays on it when it is deleted"
    memory.close()
    another.close()


def test_mapped_tensors_are_those_of_the_file(tmp_path: Path):
    written = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
        "one": torch.tensor(2.5),
    }
    save_file(written, tmp_path / WEIGHTS)
    found = dict(MappedFiles(pins=False).tensors(tmp_path / WEIGHTS))
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
