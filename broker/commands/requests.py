"""Pure: what the SDK asks (tinker 0.38.0), checked and turned into our commands.

A field that this server does not know is refused by its name. Shapes: N tokens of a datum, K
targets of each.
"""

import hashlib
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.broker.commands.protobuf import array_of, read_forward_backward
from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.wire.messages.bounds import MOST, Count
from slipstream.wire.messages.commands import Datum, Forward, LoraSpec, LossName, OptimStep, Sample
from slipstream.wire.settings.lora import LoraSection
from slipstream.wire.unreadable import UNREADABLE

R = TypeVar("R", bound=msgspec.Struct)
_MLP = {"gate_proj", "up_proj", "down_proj"}
# loss -> the float inputs it needs, and those it may have
_INPUTS: dict[str, tuple[set[str], set[str]]] = {
    "cross_entropy": ({"weights"}, set()),
    "importance_sampling": ({"logprobs", "advantages"}, {"mask", "weights"}),
    "ppo": ({"logprobs", "advantages"}, {"mask", "weights"}),
    "cispo": ({"logprobs", "advantages"}, {"mask", "weights"}),
    "dro": ({"logprobs", "advantages"}, {"mask", "weights"}),
}
_OPTIONS: dict[str, set[str]] = {
    "ppo": {"clip_low_threshold", "clip_high_threshold"},
    "cispo": {"clip_low_threshold", "clip_high_threshold"},
    "dro": {"beta"},
}
_WHY_NOT = {
    "gspo": "the reduction of its loss is not published",
    "stable_reinforce": "engines record no stability information",
    "custom": "losses of your own are computed by the SDK",
}
_MOST_TEXT = 4096  # characters of a text that ends an answer
_MOST_STOPS = 64
_MOST_ANSWERS = 4096  # answers of one sample
_MOST_TOP = 1024
_MOST_TARGETS = 1 << 22  # targets of a datum
_MOST_DATA = 1 << 16
_SECONDS = (3600, 315_360_000)  # life of a checkpoint: an hour to ten years


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that all tenants train."""

    name: str  # name that tenants use: run.model
    vocab_size: int
    longest: int  # tokens of a sequence
    lora: LoraSection  # the greatest rank, and the layers that may have adapters


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests: each of the SDK's names its type."""

    type: str = ""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters of a new model."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer of a new model."""

    type: str = "adamw"


class CreateSessionRequest(_Request, frozen=True, kw_only=True):
    """A client begins."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(_Request, frozen=True, kw_only=True):
    """A request that names a session alone."""

    session_id: str


class OfModel(_Request, frozen=True, kw_only=True):
    """A request that names a model alone."""

    model_id: str


class OfSampler(_Request, frozen=True, kw_only=True):
    """A request that names a sampler alone."""

    sampling_session_id: str


class CreateModelRequest(_Request, frozen=True, kw_only=True):
    """Make a model."""

    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeightsRequest(_Request, frozen=True, kw_only=True):
    """Load a checkpoint into a model, or make one of it."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Count | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(_Request, frozen=True, kw_only=True):
    """Update a model."""

    model_id: str
    seq_id: Count
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsRequest(_Request, frozen=True, kw_only=True):
    """Save a model with its optimizer, or for sampling."""

    model_id: str
    seq_id: Count
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class CreateSamplerRequest(_Request, frozen=True, kw_only=True):
    """Make a client that samples."""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt."""

    type: str
    tokens: list[int] = []


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt."""

    chunks: list[TextChunk]


class DrawingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is drawn."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(_Request, frozen=True, kw_only=True):
    """Draw answers to a prompt."""

    prompt: PromptBody
    sampling_params: DrawingParams
    sampling_session_id: str
    seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # a block of numbers for each copy
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class FutureRequest(_Request, frozen=True, kw_only=True):
    """The result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A client that samples, or a copy of it."""

    sampling_session_id: str
    type: str = "sampling_session"
    cloned_sampler_id: Annotated[int, msgspec.Meta(ge=0, le=2**32)] = 0


class FuturesRequest(_Request, frozen=True, kw_only=True):
    """The samples of a client that have ended."""

    target: FuturesTarget
    prev_cursor: Count = 0
    timeout: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    retrieved_request_ids: list[str] = []


class PathRequest(_Request, frozen=True, kw_only=True):
    """What is known of a checkpoint."""

    tinker_path: str


class _Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """What names a command."""

    model_id: str
    seq_id: Annotated[int, msgspec.Meta(ge=1, le=MOST)]


class TtlRequest(_Request, frozen=True, kw_only=True):
    """When a checkpoint is to expire."""

    ttl_seconds: Annotated[int, msgspec.Meta(ge=_SECONDS[0], le=_SECONDS[1])] | None = None


# Prompts and lists of samples are long; of what others say, some is kept.
_MOST_FEW_BYTES = 1 << 16
_MOST_BYTES: dict[type, int] = {SampleRequest: 1 << 24, FuturesRequest: 1 << 24}


def read(body: bytes, kind: type[R]) -> R:
    """Return a request in JSON.

    Raises:
        RequestRefusedError: it is not one, or has a field that this server does not know.
    """
    if len(body) > (most := _MOST_BYTES.get(kind, _MOST_FEW_BYTES)):
        raise RequestRefusedError(400, f"a request of {len(body)} bytes: it may have {most}")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise RequestRefusedError(400, f"not a request: {error}") from error


def number_of(body: bytes) -> tuple[str, int] | None:
    """Return the model and the number of a command, whatever else it says; None if it has none."""
    try:
        named = msgspec.json.decode(body, type=_Numbered)
    except UNREADABLE:
        return None
    return named.model_id, named.seq_id


def hash_of(*parts: bytes) -> bytes:
    """Return what tells a repetition from another request."""
    return hashlib.sha256(b"\0".join(parts)).digest()


# ---- models -------------------------------------------------------------------------------------


def model_id(session: str, number: int) -> str:
    """Return the id of a session's model, which the SDK knows as well."""
    return f"{session}:train:{number}"


def sampler_id(session: str, number: int) -> str:
    """Return the id of a session's sampler."""
    return f"{session}:sample:{number}"


def spec_of(asked: CreateModelRequest, model: ServedModel) -> LoraSpec:
    """Return the adapters of a new model.

    Raises:
        RequestRefusedError: this server has no such model, or trains no such adapters.
    """
    refuse_other_model(asked.base_model, model)
    refuse_other_optimizer(asked.optimizer_config)
    config = asked.lora_config
    if config is None:
        raise RequestRefusedError(400, "lora_config is not set: adapters alone are trained here")
    most = model.lora.rank or 0
    if not 1 <= config.rank <= most:
        raise RequestRefusedError(
            400, f"lora_config.rank must be from 1 to {most} here (lora.rank), got {config.rank}"
        )
    wanted = {name for name in model.lora.targets if _is_wanted(name, config)}
    if not wanted:
        raise RequestRefusedError(
            400,
            "lora_config names no layers that may have adapters here: these are "
            f"{', '.join(model.lora.targets)} (lora.targets)",
        )
    seed = 0 if config.seed is None else config.seed % 2**31
    if config.seed is None:  # its own of each model, and the same when it is made again
        text = f"{asked.session_id}/{asked.model_seq_id}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1
    targets = tuple(sorted(wanted))
    return LoraSpec(rank=config.rank, alpha=model.lora.alpha, targets=targets, seed=seed)


def _is_wanted(layer: str, config: LoraConfig) -> bool:
    return config.train_mlp if layer in _MLP else config.train_attn


def refuse_other_model(name: str | None, model: ServedModel) -> None:
    """Refuse a base model that is not served here."""
    if name is not None and name != model.name:
        raise RequestRefusedError(400, f"base_model {name[:200]} is not served: {model.name} is")


def refuse_other_optimizer(config: OptimizerConfig | None) -> None:
    """Refuse an optimizer that is not AdamW."""
    if config is not None and config.type != "adamw":
        raise RequestRefusedError(400, f"optimizer {config.type[:200]} is not known here: adamw is")


def read_forward(body: bytes, model: ServedModel) -> tuple[str, int, Forward | str]:
    """Return a model's id, the command's number, and the command or why it is refused.

    Raises:
        RequestRefusedError: it is no such message, or names no model.
    """
    message = read_forward_backward(body)
    if not message.model_id or not 1 <= message.seq_id < 2**31 - 1:
        raise RequestRefusedError(400, "model_id and a seq_id from 1 on are needed")
    try:
        command: Forward | str = _forward(message, model)
    except RequestRefusedError as error:
        command = str(error)
    return message.model_id, message.seq_id, command


def _forward(message: Any, model: ServedModel) -> Forward:  # noqa: ANN401 of the descriptor
    loss = str(message.loss_fn)
    if loss not in get_args(LossName):
        why = f": {_WHY_NOT[loss]}" if loss in _WHY_NOT else ""
        known = ", ".join(get_args(LossName))
        raise RequestRefusedError(400, f"loss_fn {loss[:200]!r} is none of {known}{why}")
    options: dict[str, float] = {}
    for name, value in message.loss_fn_config.items():
        if name not in _OPTIONS.get(loss, set()) or not value.HasField("number"):
            raise RequestRefusedError(400, f"loss_fn_config.{name[:200]} is unknown to {loss}")
        options[name] = _finite(value.number, f"loss_fn_config.{name}")
    if not 0 < len(message.data) <= _MOST_DATA:
        raise RequestRefusedError(400, f"data has {len(message.data)} items; 1 to {_MOST_DATA} go")
    data = tuple(
        _datum(datum, loss, model, f"data[{number}]") for number, datum in enumerate(message.data)
    )
    return Forward(
        data=data,
        loss=loss,  # type: ignore[arg-type]  # checked above
        options=options,
        backward=not message.forward_only,
    )


def _datum(datum: Any, loss: str, model: ServedModel, where: str) -> Datum:  # noqa: ANN401 of the descriptor
    tokens = _tokens(datum, model, where)
    if "target_tokens" not in datum.loss_fn_inputs:
        raise RequestRefusedError(400, f"{where} has no loss_fn_inputs.target_tokens")
    needed, allowed = _INPUTS[loss]
    arrays = {
        name: array_of(tensor, f"{where}.loss_fn_inputs.{name[:200]}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = arrays.pop("target_tokens")
    if targets.ndim not in {1, 2} or len(targets) != len(tokens) or targets.dtype.kind != "i":
        raise RequestRefusedError(
            400,
            f"{where}.loss_fn_inputs.target_tokens must be int64 of shape [{len(tokens)}] or "
            f"[{len(tokens)}, K], got {targets.dtype} {list(targets.shape)}",
        )
    if (
        not 0 < targets.size <= _MOST_TARGETS
        or targets.size > _MOST_TOP * len(targets)
        or (targets.ndim == 2 and loss != "cross_entropy")
    ):
        raise RequestRefusedError(
            400, f"{where}.loss_fn_inputs.target_tokens of shape {list(targets.shape)} for {loss}"
        )
    _refuse_no_tokens(targets, model, f"{where}.loss_fn_inputs.target_tokens")
    if missing := needed - arrays.keys():
        raise RequestRefusedError(
            400, f"{where}.loss_fn_inputs.{min(missing)} is missing: {loss} needs it"
        )
    inputs: dict[str, bytes] = {}
    for name, values in arrays.items():
        if name not in needed | allowed:
            raise RequestRefusedError(
                400, f"{where}.loss_fn_inputs.{name[:200]} is unknown to {loss}"
            )
        if values.shape != targets.shape:
            raise RequestRefusedError(
                400,
                f"{where}.loss_fn_inputs.{name} must have the shape of target_tokens, "
                f"{list(targets.shape)}, got {list(values.shape)}",
            )
        narrow = values.astype("<f4")
        if not np.isfinite(narrow).all():
            raise RequestRefusedError(
                400, f"{where}.loss_fn_inputs.{name} holds a number that is not finite"
            )
        inputs[name] = narrow.tobytes()
    return Datum(
        tokens=tokens.astype("<i4").tobytes(),
        targets=targets.astype("<i4").tobytes(),
        inputs=inputs,
        width=targets.shape[1] if targets.ndim == 2 else 1,
    )


def _tokens(datum: Any, model: ServedModel, where: str) -> NDArray[Any]:  # noqa: ANN401 of the descriptor
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise RequestRefusedError(400, f"{where}.model_input has a chunk that is no text")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, "<i4")
    if not 1 <= len(tokens) <= model.longest:
        raise RequestRefusedError(
            400, f"{where}.model_input has {len(tokens)} tokens; 1 to {model.longest} are taken"
        )
    _refuse_no_tokens(tokens, model, f"{where}.model_input")
    return tokens


def _refuse_no_tokens(ids: NDArray[Any], model: ServedModel, where: str) -> None:
    if not ((ids >= 0) & (ids < model.vocab_size)).all():
        raise RequestRefusedError(
            400,
            f"{where} holds token ids from {ids.min()} to {ids.max()}, the vocabulary has "
            f"{model.vocab_size}",
        )


def step_of(asked: OptimStepRequest) -> OptimStep:
    """Return the command of a step.

    Raises:
        RequestRefusedError: another optimizer's, or numbers that make no step.
    """
    params = asked.adam_params
    if params is None:
        kind = (asked.optimizer_params or {}).get("type")
        raise RequestRefusedError(400, f"adam_params is not set: {kind!r} is not known here")
    return _bounded(
        OptimStep,
        "adam_params",
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        epsilon=params.eps,
        weight_decay=params.weight_decay,
        clip=max(0.0, params.grad_clip_norm),
    )


def name_of_save(asked: SaveWeightsRequest) -> str:
    """Return the name under which weights are saved; empty for those of a new sampler alone.

    Raises:
        RequestRefusedError: it is no name, or no time of life.
    """
    name, ttl = asked.path, asked.ttl_seconds
    if ttl is not None and not _SECONDS[0] <= ttl <= _SECONDS[1]:
        raise RequestRefusedError(
            400, f"ttl_seconds must be from {_SECONDS[0]} to {_SECONDS[1]}, got {ttl}"
        )
    if name is None:
        return "" if asked.sampling_session_seq_id is not None else f"{asked.seq_id:06d}"
    is_name = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not is_name or not 1 <= len(name) <= 200 or name.startswith("."):
        raise RequestRefusedError(
            400, f"path {name[:200]!r} must be 1 to 200 letters, digits, dots, dashes, underscores"
        )
    return name


# ---- samples ------------------------------------------------------------------------------------


def sample_of(asked: SampleRequest, version: str, model: ServedModel) -> Sample:
    """Return the command for an engine.

    Raises:
        RequestRefusedError: the prompt is not for this model, or something is asked for that
            engines here do not give.
    """
    for name, is_set in (
        ("target_prompt_logprobs", asked.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k > 0),
        ("prompt_logprobs_last_n", asked.prompt_logprobs_last_n is not None),
        ("record_stability_info", bool(asked.record_stability_info)),
    ):
        if is_set:
            raise RequestRefusedError(400, f"{name} is not supported here")
    if any(chunk.type != "encoded_text" for chunk in asked.prompt.chunks):
        raise RequestRefusedError(400, "prompt has a chunk that is no text")
    ids = list(chain.from_iterable(chunk.tokens for chunk in asked.prompt.chunks))
    if len(ids) >= model.longest:
        raise RequestRefusedError(
            400, f"prompt has {len(ids)} tokens: a sequence has {model.longest} here"
        )
    if not ids or not all(0 <= token < model.vocab_size for token in ids):
        raise RequestRefusedError(
            400, f"prompt must hold token ids from 0 to {model.vocab_size - 1}, and one at least"
        )
    room, params = model.longest - len(ids), asked.sampling_params
    wanted = room if params.max_tokens is None else params.max_tokens
    if not 1 <= wanted <= room:
        raise RequestRefusedError(
            400,
            f"sampling_params.max_tokens of {wanted} behind a prompt of {len(ids)} tokens: a "
            f"sequence has {model.longest} here, and an answer one at least",
        )
    stop = params.stop
    texts = (stop,) if isinstance(stop, str) else tuple(s for s in stop or () if isinstance(s, str))
    numbers = tuple(s for s in stop or () if isinstance(s, int))
    if (
        any(not 1 <= len(text) <= _MOST_TEXT for text in texts)
        or len(texts) + len(numbers) > _MOST_STOPS
    ):
        raise RequestRefusedError(
            400, f"sampling_params.stop must be up to {_MOST_STOPS} texts or token ids"
        )
    if not 1 <= asked.num_samples <= _MOST_ANSWERS:
        raise RequestRefusedError(400, f"num_samples must be from 1 to {_MOST_ANSWERS}")
    if max(asked.topk_prompt_logprobs, asked.topk_sample_logprobs) > _MOST_TOP:
        raise RequestRefusedError(400, f"top-k logprobs are of at most {_MOST_TOP} tokens")
    return _bounded(
        Sample,
        "sampling_params",
        version=version,
        tokens=np.array(ids, "<i4").tobytes(),
        count=asked.num_samples,
        max_tokens=wanted,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k if 0 < params.top_k < model.vocab_size else -1,
        seed=_seed(asked),
        stop=texts,
        stop_ids=numbers,
        ignores_end=isinstance(stop, list) and not stop,
        prompt_logprobs=bool(asked.prompt_logprobs),
        prompt_top=max(0, asked.topk_prompt_logprobs),
        sample_top=max(0, asked.topk_sample_logprobs),
    )


def _seed(asked: SampleRequest) -> int:
    """Return a seed that is the same when the sample is drawn again."""
    given = asked.sampling_params.seed
    text = f"{asked.sampling_session_id}/{asked.seq_id}" if given is None else f"seed {given}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def _bounded(kind: type[R], what: str, **fields: object) -> R:
    """Return a command whose numbers are within the bounds of its fields."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(kind(**fields)), type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefusedError(400, f"{what}: {error}") from error


def _finite(number: float, name: str) -> float:
    if not abs(number) < 1e30:
        raise RequestRefusedError(400, f"{name} is {number:g}")
    return number
