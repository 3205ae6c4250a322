from pathlib import Path

from slipstream.wire.models.model_digests import model_digests, short_digest


def write_model(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_copies_of_a_model_are_the_same_and_another_is_told_by_its_last_byte(tmp_path: Path):
    weights = bytes(range(256)) * 400
    ours = model_digests(write_model(tmp_path / "a", weights))
    assert model_digests(write_model(tmp_path / "b", weights)) == ours
    other = model_digests(write_model(tmp_path / "c", weights[:-1] + b"x"))
    assert other["config.json"] == ours["config.json"] == short_digest(b"{}")
    assert other["weights"] != ours["weights"]
