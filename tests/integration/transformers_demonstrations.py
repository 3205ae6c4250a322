"""Write the gradient of transformers' loss on a padded batch, and print the loss.

Usage: transformers_demonstrations MODEL_FOLDER FILE OUT, with a file of [[token ids], [labels]]
for each row; labels are -100 where nothing is trained.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence


def main(folder: str, file: str, out: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = json.loads(Path(file).read_text())
    token_ids = [torch.tensor(ids) for ids, _ in rows]
    labels = pad_sequence([torch.tensor(row) for _, row in rows], True, -100)
    mask = pad_sequence([torch.ones_like(ids) for ids in token_ids], batch_first=True)
    padded = pad_sequence(token_ids, batch_first=True)
    loss = model(input_ids=padded, attention_mask=mask, labels=labels).loss
    loss.backward()
    save_file({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, out)
    sys.stdout.write(json.dumps(loss.item()))


if __name__ == "__main__":
    main(*sys.argv[1:])
