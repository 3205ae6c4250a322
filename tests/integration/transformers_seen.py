"""Print the log-probabilities that transformers gives each next token of texts with images.

Usage: transformers_seen MODEL_FOLDER FILE
FILE is a JSON list of [token ids, paths of images, their rows and columns of patches].
"""

import json
import sys
from pathlib import Path

import torch


def main(folder: str, file: str) -> None:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    answers = []
    with torch.no_grad():
        for tokens, paths, grids in json.loads(Path(file).read_text()):
            token_ids, seen = torch.tensor([tokens]), {}
            if paths:
                seen = processor([Image.open(path) for path in paths], return_tensors="pt")
                assert seen["image_grid_thw"][:, 1:].tolist() == grids
                seen["mm_token_type_ids"] = (token_ids == model.config.image_token_id).int()
            logits = model(token_ids, **seen).logits
            logprobs = logits[0, :-1].log_softmax(-1)
            answers.append(logprobs.gather(-1, token_ids[0, 1:, None]).squeeze(-1).tolist())
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
