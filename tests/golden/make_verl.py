"""Write what verl's example keys become: python -m tests.golden.make_verl."""

from pathlib import Path

import tomli_w

from slipstream.deploy.interop.verl.hydra import overrides_of
from slipstream.deploy.interop.verl.translate import translate
from tests.support.verl_keys import COMMON, DAPO, GRPO, MEGATRON, PPO, words

FOLDER = Path(__file__).with_name("verl")
CASES = {
    "grpo-megatron": (COMMON, GRPO, MEGATRON),
    "dapo": (COMMON, DAPO),
    "ppo-megatron": (COMMON, PPO, MEGATRON),
}


def translated(name: str) -> str:
    """Return every key with its kind and settings in the order of the report, and the file."""
    found = translate(overrides_of(words(*CASES[name])), home="/home/me")
    lines = [
        f"{key.kind:8} {key.key}" + "".join(f" {name}" for name in key.settings)
        for key in found.keys
    ]
    return "\n".join([*lines, "", tomli_w.dumps(found.table)])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(translated(name))
