"""SGLang is offered the policy's model class, and imports no other model."""

import sys
from pathlib import Path

import pytest

from slipstream.generators.sglang.policy_model.entry import classes_named

MODULES = {
    "llama": "class LlamaForCausalLM: pass\nclass Phi3ForCausalLM(LlamaForCausalLM): pass\n"
    "EntryClass = [LlamaForCausalLM, Phi3ForCausalLM]\n",
    "qwen2": "class Qwen2ForCausalLM:\n    pass\nEntryClass = Qwen2ForCausalLM\n",
    "one": "class Twice: pass\nEntryClass = Twice\n",
    "two": "class Twice: pass\nEntryClass = Twice\n",
    "body": "class InnerForCausalLM: pass\nEntryClass = []\n",
    "around": "class InnerForCausalLM: pass\nEntryClass = InnerForCausalLM\n",
    "inner": "class Hidden: pass\n",
    "broken": "raise ImportError('it needs a GPU')\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "some_models"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("some_models")]:
        monkeypatch.delitem(sys.modules, name)
    return "some_models"


@pytest.mark.parametrize(
    "name", ["Qwen2ForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM", "InnerForCausalLM"]
)
def test_the_class_of_the_policy_is_offered_alone(name: str, package: str):
    assert [one.__name__ for one in classes_named(name, package)] == [name]


def test_no_other_module_is_imported(package: str):
    classes_named("Qwen2ForCausalLM", package)
    assert f"{package}.qwen2" in sys.modules
    assert not {f"{package}.llama", f"{package}.broken"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["", "Unknown", "Twice", "Hidden", "Qwen2"])
def test_uncertain_names_are_left_to_sglang(name: str, package: str):
    assert classes_named(name, package) == []
