"""Reads an optimizer divided over replicas from a checkpoint of an undivided one, and vice versa.

Megatron writes the moments of each weight under the same name in both forms. The forms differ in
the name of the weights in float32, and in all that is not a tensor: the place of the count of
updates, and the description of groups of weights. This run's own description is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

Nested = Any  # Megatron's dicts and lists, of any depth
Load = Callable[[dict[str, Any]], dict[str, Any]]
_STATE = "optimizer.state."
# Names of weights in float32: in a divided optimizer, in an undivided one. The latter has no such
# copy of weights that are float32 themselves.
_DIVIDED, _WHOLE = f"{_STATE}param.", f"{_STATE}fp32_param."
_PLACES = (("optimizer",), ("critic", "optimizer"))


def load_resharded(wanted: dict[str, Any], load: Load, *, has_float32: bool) -> dict[str, Any]:
    """Return the state that ``wanted`` asks for, from a checkpoint with the other form.

    Args:
        wanted: state of this run's policy; it is changed.
        load: reads the requested state from the checkpoint.
        has_float32: True if the model's weights are float32.
    """
    forms = {place: _at(wanted, place) for place in _PLACES if _at(wanted, place) is not None}
    weights: dict[str, Any] = {}
    for place, form in forms.items():
        _put(wanted, place, _chosen(form, lambda part: None if _is_weight(part) else part))
        if named := _renamed(form, has_float32=has_float32):
            _put(weights, place, named)
    state = load(wanted)
    read = load(weights) if weights else {}
    for place, form in forms.items():
        found = _at(state, place)
        ours = _filled(form, found, _at(read, place))
        if (count := _count_of(found)) is not None:
            _set_count(ours, count)
        _put(state, place, ours)
    return state


def _at(state: Nested, place: Sequence[str]) -> Nested:
    for key in place:
        state = _part(state, key)
    return state


def _put(state: dict[str, Any], place: Sequence[str], part: Nested) -> None:
    *parents, last = place
    for key in parents:
        state = state.setdefault(key, {})
    state[last] = part


def _is_weight(tensor: ShardedBase) -> bool:
    return _DIVIDED in tensor.key or _WHOLE in tensor.key


def _renamed(form: Nested, *, has_float32: bool) -> Nested:
    """Return the weights in float32 alone, by their names in the checkpoint."""

    def renamed(tensor: ShardedBase) -> ShardedBase | None:
        if not _is_weight(tensor):
            return None
        if _WHOLE in tensor.key:
            return replace(tensor, key=tensor.key.replace(_WHOLE, _DIVIDED))
        if not has_float32:
            return replace(tensor, key=tensor.key.replace(_DIVIDED, _WHOLE))
        return replace(tensor, key=tensor.key.partition(_DIVIDED)[2])  # the model's own weight

    return _chosen(form, renamed)


def _chosen(form: Nested, choose: Callable[[ShardedBase], ShardedBase | None]) -> Nested:
    """Return the tensors that ``choose`` returns, at their places in a state."""
    match form:
        case ShardedBase():
            return choose(form)
        case dict():
            parts = {key: _chosen(value, choose) for key, value in form.items()}
            return {key: part for key, part in parts.items() if part is not None} or None
        case list() | tuple():
            parts = dict(enumerate(_chosen(value, choose) for value in form))
            return {key: part for key, part in parts.items() if part is not None} or None
        case _:
            return None


def _filled(form: Nested, found: Nested, weights: Nested) -> Nested:
    """Return a state in this run's form, with the tensors read."""
    match form:
        case ShardedBase():
            return found if weights is None else weights
        case LocalNonpersistentObject():
            return form.unwrap()
        case dict():
            return {
                key: _filled(value, _part(found, key), _part(weights, key))
                for key, value in form.items()
            }
        case list() | tuple():
            return type(form)(
                _filled(value, _part(found, key), _part(weights, key))
                for key, value in enumerate(form)
            )
        case _:
            return form


def _part(state: Nested, key: object) -> Nested:
    return state.get(key) if isinstance(state, dict) else None


def _count_of(found: Nested) -> float | None:
    """Return an optimizer's number of updates, in either form."""
    if not isinstance(found, dict):
        return None
    if "common_step" in found:
        return float(found["common_step"])
    steps = [group["step"] for group in found.get("param_groups", ()) if "step" in group]
    if steps:
        return float(steps[0])
    counts = (_count_of(value) for value in found.values())
    return next((count for count in counts if count is not None), None)


def _set_count(ours: Nested, count: float) -> None:
    if not isinstance(ours, dict):
        return
    if "param_state" in ours:
        for group in ours["optimizer"]["param_groups"]:
            group["step"] = count
    elif "state" in ours:
        ours["state"]["common_step"] = torch.tensor(count)
    else:  # an optimizer of bfloat16 weights, or a chain of optimizers
        for part in ours.values():
            _set_count(part, count)
