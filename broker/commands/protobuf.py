"""The messages that the SDK sends and reads as protobuf, by their numbers on the wire.

Those of tinker 0.38.0. The descriptors are in a pool of their own: the SDK may be in this process.
Shapes: N tokens of a datum, K targets of each.
"""

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.wire.messages.commands import Losses, Sampled, Top

_PACKAGE = "slipstream_serving"
_FLOAT32, _INT64 = 1, 2
_FINISH = {"stop": 0, "length": 1}
# message -> fields: (number, name, type); "type*" is repeated, "type?" knows whether it is there,
# "name:type" is a map from names.
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "SparseCsr": ((1, "values", "bytes"),),
    "Tensor": (
        (1, "dense", "bytes"),
        (2, "sparse_csr", "SparseCsr"),
        (3, "dtype", "int32"),
        (4, "shape", "int64*"),
    ),
    "EncodedText": ((1, "tokens", "bytes"),),
    "Other": ((1, "data", "bytes"),),
    "Chunk": ((1, "encoded_text", "EncodedText"), (2, "image", "Other"), (3, "dmel", "Other")),
    "Datum": ((1, "model_input", "Chunk*"), (2, "loss_fn_inputs", "name:Tensor")),
    "LossConfigValue": ((1, "number", "double?"), (2, "text", "string?")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "Datum*"),
        (4, "loss_fn", "string"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config", "name:LossConfigValue"),
    ),
    "BatchedTensor": (
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "int64*"),
    ),
    "ArrayRecord": (
        (1, "type_tag", "string"),
        (2, "fields", "name:BatchedTensor"),
        (3, "num_datums", "int64"),
    ),
    "ForwardBackwardOutput": (
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "ArrayRecord*"),
        (3, "metrics", "name:double"),
    ),
    "TopkLogprobs": (
        (1, "token_ids", "bytes"),
        (2, "logprobs", "bytes"),
        (3, "k", "uint32"),
        (4, "length", "uint32"),
    ),
    "SampledSequence": (
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "bytes?"),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ),
    "SampleResponse": (
        (1, "sequences", "SampledSequence*"),
        (2, "prompt_logprobs", "bytes?"),
        (3, "topk_prompt_logprobs", "TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", "int32"),
    ),
}
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("name:"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", kind.removeprefix("name:"))
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    plain = kind.rstrip("*?")
    if plain in _MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
    else:
        field.type = getattr(_Field, f"TYPE_{plain.upper()}")


def _classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add_field(message, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()


def read_forward_backward(body: bytes) -> Any:  # noqa: ANN401 fields come from the descriptor
    """Return a request for a loss, with the fields of ``_MESSAGES``.

    Raises:
        RequestRefusedError: it is no such message.
    """
    message = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestRefusedError(400, f"no request of protobuf: {error}") from error
    return message


def array_of(tensor: Any, name: str) -> NDArray[Any]:  # noqa: ANN401 fields come from the descriptor
    """Return a dense tensor of float32 or int64.

    Raises:
        RequestRefusedError: it is sparse, of another type, or its shape is not that of its bytes.
    """
    if tensor.HasField("sparse_csr"):
        raise RequestRefusedError(400, f"{name} is sparse, which this server does not read")
    if tensor.dtype not in {_FLOAT32, _INT64}:
        raise RequestRefusedError(400, f"{name} must be float32 or int64, got type {tensor.dtype}")
    dtype = np.dtype("<f4" if tensor.dtype == _FLOAT32 else "<i8")
    shape = tuple(tensor.shape)
    try:
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape or (len(values),))
    except ValueError as error:
        raise RequestRefusedError(
            400, f"{name} has {len(tensor.dense)} bytes, which no {dtype} of shape {shape} has"
        ) from error


def write_losses(losses: Losses) -> bytes:
    """Return the outcome of a loss as ForwardBackwardOutput, one record for each datum."""
    output: Any = _CLASSES["ForwardBackwardOutput"]()
    output.loss_fn_output_type = "ArrayRecord"
    for name, value in losses.metrics.items():
        output.metrics[name] = value
    for logprobs, width in zip(losses.logprobs, losses.widths, strict=True):
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields["logprobs"]
        field.data, field.dtype = logprobs, _FLOAT32
        field.offsets = np.array([0, len(logprobs)], "<i8").tobytes()
        if width > 1:
            field.trailing_shape.append(width)
    return bytes(output.SerializeToString())


def write_sampled(sampled: Sampled) -> bytes:
    """Return answers as SampleResponse."""
    response: Any = _CLASSES["SampleResponse"]()
    for answer in sampled.answers:
        sequence = response.sequences.add(
            stop_reason=_FINISH[answer.finish], tokens=answer.tokens, logprobs=answer.logprobs
        )
        _write_top(sequence.topk_sampled_logprobs, answer.top)
    if sampled.prompt_logprobs is not None:
        response.prompt_logprobs = sampled.prompt_logprobs
    _write_top(response.topk_prompt_logprobs, sampled.prompt_top)
    response.prompt_cache_hit_tokens = sampled.cached_tokens
    return bytes(response.SerializeToString())


def _write_top(field: Any, top: Top | None) -> None:  # noqa: ANN401 fields come from the descriptor
    if top is not None:
        field.token_ids, field.logprobs, field.k = top.ids, top.logprobs, top.k
        field.length = len(top.ids) // (4 * top.k)
