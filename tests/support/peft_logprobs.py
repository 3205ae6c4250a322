"""Print the log-probabilities that the real PEFT gives each next token.

Usage: peft_logprobs MODEL_FOLDER ADAPTER_FOLDER FILE (a JSON list of token sequences)
"""

import json
import sys
from pathlib import Path

import torch

from slipstream.generators.sglang.cpu import define_torchvision_operators


def main(folder: str, adapter: str, file: str) -> None:
    define_torchvision_operators()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter)
    answers = []
    with torch.no_grad():
        for sequence in json.loads(Path(file).read_text()):
            token_ids = torch.tensor([sequence])
            logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
            answers.append(logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
