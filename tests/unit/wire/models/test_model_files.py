import json
from pathlib import Path

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.models.model_files import (
    as_exported,
    copied_files,
    refuse_no_model,
    weight_files,
)
from slipstream.wire.settings.sections import RunSection, model_folder


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def index(folder: Path, *names: str) -> None:
    weight_map = {f"tensor.{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_weights_are_one_file_or_those_of_the_index(tmp_path: Path):
    index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(ConfigError, match=r"names 'b\.safetensors', which is no file beside it"):
        weight_files(tmp_path)
    (tmp_path / "b.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../b", "sub/c", "", ".."]
)
def test_an_index_names_files_beside_it(tmp_path: Path, name: str):
    index(tmp_path, "a.safetensors", name)
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c").touch()
    with pytest.raises(ConfigError, match=r"index\.json names .*no file beside it.*\(run\.model\)"):
        weight_files(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json: .*\(run\.model\)"):
        weight_files(tmp_path)
    with pytest.raises(ConfigError, match=r"index\.json: .*\(algo\.teacher\.model\)"):
        weight_files(tmp_path, "algo.teacher.model")


@pytest.mark.parametrize(
    ("names", "way_out"),
    [
        ((), r"hf download NAME --local-dir DIR"),
        (("adapter_config.json", "adapter_model.safetensors"), r"by lora\.adapter, or add them"),
        (("refs", "snapshots"), r"name a folder in its snapshots/"),
        (("consolidated.00.pth", "params.json"), r"write save_pretrained's"),
        (("model-q4_k_m.gguf",), r"name the folder that they were made from"),
    ],
)
def test_another_folder_is_refused_with_the_way_to_a_model(
    tmp_path: Path, names: tuple[str, ...], way_out: str
):
    folder = folder_with(tmp_path / "m", *names)
    with pytest.raises(ConfigError, match=rf"no config\.json in .*{way_out}.* \(run\.model\)"):
        model_folder(RunSection(model=str(folder)))
    with pytest.raises(ConfigError, match=rf"{way_out}.* \(algo\.teacher\.model\)"):
        refuse_no_model(folder, "algo.teacher.model")


@pytest.mark.parametrize(
    ("names", "way_out"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), r"by lora\.adapter"),
        (("pytorch_model-00001-of-00002.bin",), r"write save_pretrained's"),
        (("model-00001-of-00002.safetensors",), r"save the whole folder again"),
    ],
)
def test_a_folder_with_other_weights_is_refused_with_the_way_to_them(
    tmp_path: Path, names: tuple[str, ...], way_out: str
):
    folder = folder_with(tmp_path / "m", "config.json", *names)
    with pytest.raises(ConfigError, match=rf"holds neither .*{way_out}.* \(run\.model\)"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_no_file(tmp_path: Path, name: str):
    folder = folder_with(tmp_path / "m", "config.json", "README.md")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    (folder / "README.md").write_text(pointer)  # is not read
    refuse_no_model(folder)
    (folder / name).write_text(pointer)
    with pytest.raises(
        ConfigError, match=rf"/m/{name} is a pointer of Git LFS.* git lfs pull in the repos"
    ):
        model_folder(RunSection(model=str(folder)))


def test_an_export_takes_config_and_tokenizer_over_and_no_weights(tmp_path: Path):
    names = ("config.json", "merges.txt", "model.safetensors", "model.safetensors.index.json")
    folder = folder_with(tmp_path / "m", *names, "modeling_own.py", "tiktoken.model", "README.md")
    (folder / "more.json").mkdir()
    folder_with(folder / "additional_chat_templates", "rag.jinja")
    assert [str(path.relative_to(folder)) for path in copied_files(folder)] == [
        *("additional_chat_templates/rag.jinja", "config.json", "merges.txt"),
        *("modeling_own.py", "tiktoken.model"),
    ]


CODE = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


@pytest.mark.parametrize(
    ("auto_map", "files", "left"),
    [
        (CODE, {"configuration_own.py", "modeling_own.py"}, CODE),
        (CODE, {"configuration_own.py"}, {"AutoConfig": CODE["AutoConfig"]}),
        (CODE, set(), None),
        ({"AutoTokenizer": ["tokenization_own.Slow", None]}, {"modeling_own.py"}, None),
        (
            {"AutoTokenizer": ["tokenization_own.Slow", None]},
            {"tokenization_own.py"},
            {"AutoTokenizer": ["tokenization_own.Slow", None]},
        ),
        ({"AutoTokenizer": [None, "a.Fast"]}, set(), None),
        (["tokenization_own.Slow", None], set(), None),  # as older files have it
        (["tokenization_own.Slow", None], {"tokenization_own.py"}, ["tokenization_own.Slow", None]),
        (
            {"AutoConfig": "org/other--configuration_own.OwnConfig"},
            set(),
            {"AutoConfig": "org/other--configuration_own.OwnConfig"},
        ),
    ],
)
def test_an_export_names_no_code_that_is_not_there(auto_map: object, files: set[str], left: object):
    exported = as_exported({"vocab_size": 9, "auto_map": auto_map}, files)
    assert exported == {"vocab_size": 9} | ({} if left is None else {"auto_map": left})


def test_an_export_says_what_its_weights_are():
    config = {
        "quantization_config": {"quant_method": "fp8"},
        "num_nextn_predict_layers": 1,
        "num_mtp_layers": 0,
        "hidden_size": 8,
    }
    assert as_exported(config, ()) == {
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
        "hidden_size": 8,
    }


def test_an_export_follows_no_link_out_of_the_folder(tmp_path: Path):
    (tmp_path / "secret").write_text("hunter2")
    folder = folder_with(tmp_path / "m", "config.json", "real.json")
    (folder / "vocab.json").symlink_to("real.json")
    assert [path.name for path in copied_files(folder)] == [
        "config.json",
        "real.json",
        "vocab.json",
    ]
    for target in ("../secret", str(tmp_path / "secret")):
        (folder / "vocab.json").unlink()
        (folder / "vocab.json").symlink_to(target)
        with pytest.raises(ConfigError, match=r"vocab\.json is a link to .*secret, outside of"):
            copied_files(folder)
        with pytest.raises(ConfigError, match=r"\(run\.model\)"):  # before a run, not at its end
            model_folder(RunSection(model=str(folder)))


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path: Path):
    cache = tmp_path / "models--a--b"
    snapshot = folder_with(cache / "snapshots" / "0123")
    blobs = folder_with(cache / "blobs", "aa", "bb")
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "tokenizer.json").symlink_to(blobs / "bb")
    (tmp_path / "model").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "model"):
        assert [path.name for path in copied_files(folder)] == ["config.json", "tokenizer.json"]
    (snapshot / "merges.txt").symlink_to("../../../secret")
    (tmp_path / "secret").touch()
    with pytest.raises(ConfigError, match=r"merges\.txt is a link"):
        copied_files(snapshot)
