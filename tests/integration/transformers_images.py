"""Logprobs that transformers computes for sequences with images: questions and answers are lines.

A question is {"model": FOLDER, "sequence": [token, ..], "images": [[[digest, first_token,
num_tokens, rows, columns], FILE], ..], "barred": token or null}; its answer has the logprob of
each token but the first.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.vision_models import VOCABULARY


@cache
def model_of(folder: str) -> Any:  # noqa: ANN401
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    # One more token, with the embedding of an image's: a policy may choose that as any other,
    # and transformers takes each for a part of an image.
    known = model.get_input_embeddings().weight.detach()
    image_token = model.config.image_token_id
    rows = torch.cat([known, known[image_token : image_token + 1]])
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(rows))
    return model


def logprobs(folder: str, ids: list[int], images: list[Any], barred: int | None) -> list[float]:
    import torch

    from slipstream.wire.models.image_law import image_law
    from slipstream.wire.models.pixels import patches

    law = image_law(Path(folder))
    assert law is not None
    pictures: dict[str, Any] = {}
    grids = [span[3:] for span, _ in images]
    tokens = torch.tensor([ids])
    of_image = torch.zeros_like(tokens)
    for (_, first, num, *_), _ in images:
        of_image[0, first : first + num] = 1
    inputs = tokens.masked_fill((tokens == law.image_token) & (of_image == 0), len(VOCABULARY))
    if images:
        pixels = [
            patches(Path(file).read_bytes(), *grid, law)
            for grid, (_, file) in zip(grids, images, strict=True)
        ]
        pictures = {
            "pixel_values": torch.cat([torch.from_numpy(patches) for patches in pixels]),
            "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
            "mm_token_type_ids": of_image,
        }
    with torch.no_grad():
        logits = model_of(folder)(input_ids=inputs, **pictures).logits[0, :-1]
    if barred is not None:
        logits[:, barred] = float("-inf")
    chosen = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])
    return [float(value) for value in chosen[:, 0]]


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        found = logprobs(*(asked[key] for key in ("model", "sequence", "images", "barred")))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
