"""Pure: what training on a sequence costs, in floating-point operations, and what GPUs can do.

Only products of matrices count, a multiplication and an addition each as one operation. Norms,
rotary embeddings, the softmax and the optimizer are a few in a thousand.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from slipstream.wire.models.adapters import AdapterFacts, is_target
from slipstream.wire.models.hf_config import HfConfig

# A product of [tokens, k] and [k, n] is 2 k n operations for each token; its backward pass is two
# such products, one for the gradient of each factor.
_FORWARD_AND_BACKWARD = 3
_PER_PARAMETER = 2 * _FORWARD_AND_BACKWARD
_PER_FROZEN_PARAMETER = 2 * 2  # no gradient of its own


def num_multiplied_parameters(hf: HfConfig) -> int:
    """Return how many parameters each token is multiplied with, the output layer's included.

    The embedding is looked up and not multiplied; where it is the output layer's weight too, it
    counts once, as that.
    """
    sizes = hf.sizes

    layers = sum(
        count * math.prod(tensor.shape_of_one(sizes)) * (hf.experts_per_token if "*" in name else 1)
        for layer, count in hf.family.layers_of(hf, range(hf.num_hidden_layers))
        for name, parameter in layer.items()
        for tensor in parameter.tensors
        if len(tensor.shape) > 1
    )
    return layers + sizes["vocabulary"] * sizes["hidden"]


def num_adapter_parameters(hf: HfConfig, adapters: AdapterFacts) -> int:
    """Return how many parameters of adapters each token is multiplied with."""
    return sum(
        count
        * adapters.rank
        * sum(tensor.shape_of_one(hf.sizes))
        * (hf.experts_per_token if "*" in name else 1)
        for layer, count in hf.family.layers_of(hf, range(hf.num_hidden_layers))
        for name, parameter in layer.items()
        for tensor in parameter.tensors
        if is_target(tensor.name, adapters.targets)
    )


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Operations of a sequence by its length l: linear * l + quadratic * l * l.

    Layers with a window add ``windowed`` for each pair of tokens that it leaves. The default counts
    tokens.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    output: float = 0.0  # part of linear that a token costs only before one that is trained
    windowed: float = 0.0  # the same as quadratic, of layers with a window
    window: int = 0  # tokens that a token attends to there

    @classmethod
    def of(cls, hf: HfConfig, adapters: AdapterFacts | None = None) -> Self:
        """Return the operations of training: one forward pass and its backward pass.

        With ``adapters`` these alone are trained.

        ::

            linear     6 N      N = parameters that a token is multiplied with; 4 N + 6 N_a with
                                N_a of adapters: frozen weights have no gradient of their own
                       18 L' s  L' = layers of linear attention, s = numbers in one's state
            quadratic  6 L q    L = other layers, q = channels of all query heads (of latent
                                attention the mean of queries' and values')

        Both are of Chowdhery et al. 2022, PaLM, appendix B (arXiv:2204.02311): 6 N + 12 L H Q T a
        token of a sequence of T, with H heads of size Q. Theirs counts every pair of tokens in
        attention. Of a causal mask half of them are left (l * l / 2), and the other half is not
        computed by the kernels that the learner uses; of a window w below l, w (2 l - w) / 2 are
        left. The first term is that of Kaplan et al. 2020,
        section 2.1 (arXiv:2001.08361), where N leaves out the embedding; ours has the output layer,
        whose product is computed.

        What is computed again in a backward pass (activations, attention's scores) does not count,
        as in figures of MFU. A forward pass alone is a third of both, so that shares of work are
        the same with any number of them.
        """
        layers = len(hf.attention_layers)
        windows = [hf.window_of(number) for number in hf.attention_layers]
        channels = (hf.sizes["queries"] + hf.sizes["outputs"]) / 2
        scores_and_values = 2 * 2 * channels / 2  # two products, over half of the pairs
        linear = _PER_PARAMETER * num_multiplied_parameters(hf)
        if adapters is not None:
            linear = _PER_FROZEN_PARAMETER * num_multiplied_parameters(hf)
            linear += _PER_PARAMETER * num_adapter_parameters(hf, adapters)
        # A token corrects its state and reads it: three products.
        state = _FORWARD_AND_BACKWARD * 3 * 2 * hf.state_size
        linear += (hf.num_hidden_layers - layers) * state
        head = hf.sizes["vocabulary"] * hf.sizes["hidden"]
        output = (_PER_PARAMETER if adapters is None else _PER_FROZEN_PARAMETER) * head
        of_layer = _FORWARD_AND_BACKWARD * scores_and_values
        return cls(
            linear=linear,
            quadratic=windows.count(None) * of_layer,
            output=output,
            windowed=(layers - windows.count(None)) * of_layer,
            window=hf.sliding_window or 0,
        )

    def flops_within(self, bounds: Sequence[int], num_trained: int) -> float:
        """Return the FLOPs of sequences laid end to end, which attend to themselves alone.

        Of their tokens ``num_trained`` were chosen by the policy.
        """
        whole = sum(self.flops(end - start) for start, end in pairwise(bounds))
        return whole - self.output * (bounds[-1] - bounds[0] - num_trained)

    def flops(self, num_tokens: float) -> float:
        """Return the operations of one sequence; of a mean length, those of equal sequences."""
        seen = min(num_tokens, self.window)  # pairs are seen (2 l - seen) / 2
        pairs = self.quadratic * num_tokens**2 + self.windowed * seen * (2 * num_tokens - seen)
        return self.linear * num_tokens + pairs


@dataclass(frozen=True, slots=True)
class ImageCost:
    """Operations of a vision tower by the patches n of an image: linear * n + whole * n * n.

    Blocks with windows add ``windowed`` for each pair of patches of a window, ``window`` at most.
    """

    linear: float
    whole: float
    windowed: float = 0.0
    window: int = 0  # patches

    @classmethod
    def of(cls, hf: HfConfig) -> "ImageCost | None":
        """Return the operations of an image in a step; None of a model that sees none.

        A frozen tower has a forward pass alone. Weights of blocks multiply every patch, those of
        mergers every square of patches. In attention every pair of a segment counts.
        """
        if hf.vision is None:
            return None
        vision, square = hf.vision, hf.vision.spatial_merge_size**2
        passes = _FORWARD_AND_BACKWARD if hf.trains_vision else 1
        matrices = {name: shape for name, shape in hf.tower_shapes.items() if len(shape) > 1}
        per_patch = sum(
            math.prod(shape) / (square if "merger" in name else 1)
            for name, shape in matrices.items()
            if "pos_embed" not in name  # it is looked up
        )
        pairs = passes * 2 * 2 * vision.hidden_size  # scores and values
        windows = vision.depth - len(vision.fullatt_block_indexes) if vision.window else 0
        return cls(
            linear=passes * 2 * per_patch,
            whole=(vision.depth - windows) * pairs,
            windowed=windows * pairs,
            window=vision.window**2 * square,
        )

    def flops(self, rows: int, columns: int) -> float:
        """Return the operations of an image with so many rows and columns of patches."""
        count = rows * columns
        pairs = self.whole * count**2 + self.windowed * count * min(count, self.window)
        return self.linear * count + pairs


# TFLOP/s of tensor cores in bfloat16, without sparsity, from NVIDIA's data sheets, which give some
# with sparsity: half of that. The first name that a GPU's name holds counts.
_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),  # SXM
    ("H200 NVL", 835.0),
    ("H200", 989.0),  # SXM
    ("GH200", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
)


def peak_tflops_of(gpu_name: str) -> float | None:
    """Return what a GPU of this name does at most in bfloat16, in TFLOP/s; None if unknown.

    A part of a GPU (MIG) is unknown.
    """
    if re.search(r"\bMIG\b", gpu_name):
        return None
    found = (peak for name, peak in _PEAK_TFLOPS if re.search(rf"\b{name}\b", gpu_name))
    return next(found, None)
