"""Print the log-probabilities that the real PEFT gives each next token.

Usage: peft_logprobs MODEL_FOLDER FILE [BARRED_TOKEN...]
FILE is a JSON object of token sequences by the folder of an adapter; so is what is printed. Barred
tokens are left out of the distribution.
"""

import json
import sys
from pathlib import Path

import torch


def main(folder: str, file: str, *barred: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    answers: dict[str, list[list[float]]] = {}
    for adapter, sequences in json.loads(Path(file).read_text()).items():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter)
        answers[adapter] = []
        for sequence in sequences:
            token_ids = torch.tensor([sequence])
            with torch.no_grad():
                logits = model(token_ids).logits[0, :-1]
            logits[:, [int(token) for token in barred]] = float("-inf")
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1)
            answers[adapter].append(chosen.tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
