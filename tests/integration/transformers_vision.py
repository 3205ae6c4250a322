"""Import transformers beside torchvision, whose build must be that of torch; print a model type."""

import sys


def main() -> None:
    import torchvision  # noqa: F401 it fails beside another torch
    from transformers import LlamaConfig

    sys.stdout.write(LlamaConfig().model_type)


if __name__ == "__main__":
    main()
