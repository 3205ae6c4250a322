"""Reads the contents of safetensors files and checks completeness, without reading a tensor."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from slipstream.wire.errors import EngineError

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(path: Path) -> Shapes:
    """Return the shape of each tensor in a file.

    Raises:
        OSError: the file cannot be opened.
        SafetensorError: it has no safetensors header, or one that describes another file size.
    """
    with safe_open(path, framework="numpy") as file:  # no tensor is read
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 it is no dict


def check_weight_files(folder: Path) -> None:
    """Check that a folder holds safetensors files, each of the length that its header describes.

    Raises:
        EngineError: the folder has no such file, or one that cannot be read, is cut off or too
            long.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"{folder} holds no safetensors file to load weights from")
    for path in paths:
        try:
            tensor_shapes(path)
        except OSError as error:
            raise EngineError(f"cannot read the weights in {path}: {error}") from error
        except SafetensorError as error:
            size = path.stat().st_size
            raise EngineError(f"{path} ({size} bytes) is no whole weight file: {error}") from error
