"""What three implementations of a model write down of the same tokens, to be compared.

A file of numpy arrays (.npz) by point: of each layer ``layer I attention``, ``layer I experts``
(the numbers of those chosen) and ``layer I mlp``, at last ``logprobs``. Rows are the tokens of all
sequences, end to end; a file may have some of them, whose numbers are in ``rows POINT``.
"""

TOKENS = "tokens.json"  # the sequences, in the folder of all files
DEQUANTIZED = "dequantized"  # the model there, as the learner has it if its own is quantized
LOGPROBS = "logprobs"  # logprob of each token after those before it; 0 for the first of a sequence
PARTS = ("attention", "experts", "mlp")


def point(layer: int, part: str) -> str:
    """Return the name of a part of a layer."""
    return f"layer {layer} {part}"


def rows_of(name: str) -> str:
    """Return the name of the numbers of a point's tokens."""
    return f"rows {name}"
