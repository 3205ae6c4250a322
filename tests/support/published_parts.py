"""The tensors that the ranks of a learner wrote, whichever hosts keep them."""

from typing import TYPE_CHECKING

from slipstream.weightbus.version.layout import part_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.snapshot import tensor_views

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.learner.publish.weight_writer import WeightWriter


def memory_of(writer: "WeightWriter", part: int) -> SharedSlots:
    """Map the memory of a part; all hosts are this machine."""
    return SharedSlots.open(writer.paths_of[part], part_layout(writer.layout, part))


def written_tensors(writer: "WeightWriter", slot: int) -> "dict[str, Tensor]":
    """Return the tensors in a slot of all parts, by name."""
    found: dict[str, Tensor] = {}
    for part in range(writer.num_parts):
        layout = part_layout(writer.layout, part)
        found |= tensor_views(layout, memory_of(writer, part).slot(slot))
    return found
