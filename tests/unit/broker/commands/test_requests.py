"""What the SDK sends, by its own serializers, and what is refused with a reason."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.broker.commands import requests as asks
from slipstream.broker.commands.protobuf import write_losses, write_sampled
from slipstream.broker.commands.refusals import RequestRefusedError
from slipstream.wire.messages.commands import Forward, LoraSpec, Losses, Sampled, SampledAnswer, Top
from slipstream.wire.settings.lora import LoraSection

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_proto_response  # noqa: E402

SERVED = asks.ServedModel(name="m", vocab_size=20, longest=16, lora=LoraSection(rank=8))
OFFERED = ("q_proj", "k_proj", "v_proj", "o_proj")


def tensor(values: list[Any], dtype: str = "float32", shape: list[int] | None = None) -> object:
    shape = shape or [len(values)]
    return types.TensorData(data=values, dtype=dtype, shape=shape)


def data(**inputs: object) -> object:
    given = {"target_tokens": tensor([2, 3, 4], "int64"), "weights": tensor([0.0, 1.0, 0.5])}
    found = {name: value for name, value in (given | inputs).items() if value is not None}
    return types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=found)


def sent(datum: object, loss: str = "cross_entropy", **config: object) -> bytes:
    body = types.ForwardBackwardInput(data=[datum], loss_fn=loss, loss_fn_config=config or None)
    asked = types.ForwardBackwardRequest(forward_backward_input=body, model_id="m:1", seq_id=3)
    return bytes(forward_backward_request_to_proto(asked).SerializeToString())


def read(datum: object, loss: str = "cross_entropy", **config: object) -> Forward | str:
    model, number, found = asks.read_forward(sent(datum, loss, **config), SERVED)
    assert (model, number) == ("m:1", 3)
    return found


ADVANTAGES = {
    "weights": None,
    "logprobs": tensor([-1.0, -2.0, -3.0]),
    "advantages": tensor([0.0, 1.0, 1.0]),
}


def test_a_forward_backward_of_the_sdk_is_read():
    found = read(data(**ADVANTAGES), "ppo", clip_low_threshold=0.7)
    assert isinstance(found, Forward)
    assert (found.loss, found.options, found.backward) == ("ppo", {"clip_low_threshold": 0.7}, True)
    (datum,) = found.data
    assert np.frombuffer(datum.tokens, "<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(datum.targets, "<i4").tolist() == [2, 3, 4]
    assert np.frombuffer(datum.inputs["logprobs"], "<f4").tolist() == [-1.0, -2.0, -3.0]
    several = data(
        target_tokens=tensor([2, 3, 4, 5, 6, 7], "int64", [3, 2]),
        weights=tensor([0.5] * 6, shape=[3, 2]),
    )
    wide = read(several)
    assert isinstance(wide, Forward)
    assert wide.data[0].width == 2


@pytest.mark.parametrize(
    ("datum", "loss", "config", "message"),
    [
        (data(), "gspo", {}, "reduction of its loss is not published"),
        (data(), "stable_reinforce", {}, "no stability information"),
        (data(), "mine", {}, "is none of cross_entropy"),
        (data(), "cross_entropy", {"beta": 0.1}, "loss_fn_config.beta is unknown"),
        (data(weights=None), "cross_entropy", {}, "weights is missing"),
        (data(weights=tensor([1.0, 1.0])), "cross_entropy", {}, "must have the shape of target"),
        (data(target_tokens=tensor([2, 3], "int64")), "cross_entropy", {}, r"int64 of shape \[3\]"),
        (data(target_tokens=tensor([2.0, 3.0, 4.0])), "cross_entropy", {}, "got float32"),
        (data(target_tokens=tensor([2, 3, 20], "int64")), "cross_entropy", {}, "vocabulary has 20"),
        (data(weights=tensor([1.0, float("nan"), 1.0])), "cross_entropy", {}, "not finite"),
        (data(extra=tensor([1.0, 1.0, 1.0])), "cross_entropy", {}, "extra is unknown"),
        (data(), "importance_sampling", {}, "is missing: importance_sampling needs it"),
        (
            data(
                target_tokens=tensor([1] * 3075, "int64", [3, 1025]),
                weights=tensor([1.0] * 3075, shape=[3, 1025]),
            ),
            "cross_entropy",
            {},
            r"of shape \[3, 1025\]",
        ),
    ],
)
def test_what_is_wrong_with_a_forward_backward_is_said(
    datum: object, loss: str, config: dict[str, Any], message: str
):
    found = read(datum, loss, **config)
    assert isinstance(found, str)
    assert re.search(message, found), found


def test_a_sequence_that_is_too_long_or_no_text_is_refused():
    long = types.Datum(
        model_input=types.ModelInput.from_ints([1] * 17),
        loss_fn_inputs={"target_tokens": tensor([1] * 17, "int64"), "weights": tensor([1.0] * 17)},
    )
    found = read(long)
    assert isinstance(found, str)
    assert "17 tokens; 1 to 16 are taken" in found
    seen = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
        loss_fn_inputs={"target_tokens": tensor([1], "int64"), "weights": tensor([1.0])},
    )
    assert "no text" in str(read(seen))
    with pytest.raises(RequestRefusedError, match="no request of protobuf"):
        asks.read_forward(b"\xff\xff\xff", SERVED)


def of_sdk(request: object) -> bytes:
    return bytes(request.model_dump_json(exclude_none=True).encode())


def made(rank: int = 8, **changed: object) -> asks.CreateModelRequest:
    config = types.LoraConfig(rank=rank, **changed)
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="m", lora_config=config
    )
    return asks.read(of_sdk(request), asks.CreateModelRequest)


def test_adapters_are_those_that_a_client_names():
    assert asks.spec_of(made(seed=7), SERVED) == LoraSpec(
        rank=8, alpha=32.0, targets=tuple(sorted(SERVED.lora.targets)), seed=7
    )
    assert asks.spec_of(made(train_mlp=False), SERVED).targets == tuple(sorted(OFFERED))
    assert asks.spec_of(made(), SERVED).seed == asks.spec_of(made(), SERVED).seed
    with pytest.raises(RequestRefusedError, match=r"from 1 to 8 here \(lora.rank\), got 9"):
        asks.spec_of(made(9), SERVED)
    attention = replace(SERVED, lora=LoraSection(rank=8, targets=OFFERED))
    with pytest.raises(RequestRefusedError, match="names no layers"):
        asks.spec_of(made(train_attn=False), attention)
    with pytest.raises(RequestRefusedError, match="is not served: other is"):
        asks.spec_of(made(), replace(SERVED, name="other"))


def step(**changed: object) -> asks.OptimStepRequest:
    request = types.OptimStepRequest(
        optim_params=types.AdamParams(**changed), model_id="m", seq_id=1
    )
    return asks.read(of_sdk(request), asks.OptimStepRequest)


def test_a_step_has_its_own_numbers():
    found = asks.step_of(step(learning_rate=0.5, weight_decay=0.1, grad_clip_norm=2.0))
    assert (found.lr, found.beta2, found.epsilon, found.clip) == (0.5, 0.95, 1e-12, 2.0)
    with pytest.raises(RequestRefusedError, match="adam_params"):
        asks.step_of(step(beta1=1.0))
    with pytest.raises(RequestRefusedError, match="adam_params"):
        asks.step_of(step(learning_rate=-1.0))
    other = types.OptimStepRequest(
        optim_params=types.DimuonParams(learning_rate=0.1), model_id="m", seq_id=1
    )
    with pytest.raises(RequestRefusedError, match="'dimuon' is not known"):
        asks.step_of(asks.read(of_sdk(other), asks.OptimStepRequest))


def sampled(
    tokens: list[int] | None = None, params: dict[str, Any] | None = None, **changed: object
) -> asks.SampleRequest:
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2] if tokens is None else tokens),
        sampling_params=types.SamplingParams(**(params or {})),
        sampling_session_id="q",
        seq_id=4,
        **changed,
    )
    return asks.read(of_sdk(request), asks.SampleRequest)


def test_a_sample_of_the_sdk_is_read():
    found = asks.sample_of(sampled(params={"stop": ["x"], "seed": 5}, num_samples=3), "v", SERVED)
    assert (found.version, found.count, found.max_tokens, found.stop) == ("v", 3, 14, ("x",))
    assert found.seed == asks.sample_of(sampled(params={"seed": 5}), "", SERVED).seed
    ends = asks.sample_of(sampled(params={"stop": [7, 8], "max_tokens": 2}), "", SERVED)
    assert (ends.stop_ids, ends.ignores_end, ends.max_tokens) == ((7, 8), False, 2)
    assert asks.sample_of(sampled(params={"stop": []}), "", SERVED).ignores_end
    tops = [asks.sample_of(sampled(params={"top_k": k}), "", SERVED).top_k for k in (7, 20, 2**40)]
    assert tops == [7, -1, -1], "all of a vocabulary of 20, which engines have as 32 bits"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (sampled([1, 20]), "token ids from 0 to 19"),
        (sampled([]), "one at least"),
        (sampled([1] * 16), "prompt has 16 tokens"),
        (sampled(params={"max_tokens": 15}), "max_tokens of 15"),
        (sampled(params={"temperature": -1.0}), "sampling_params"),
        (sampled(params={"top_p": 0.0}), "sampling_params"),
        (sampled(num_samples=0), "num_samples must be from 1"),
        (sampled(prompt_alt_tokens_k=2), "prompt_alt_tokens_k is not supported"),
        (sampled(record_stability_info=True), "record_stability_info is not supported"),
        (sampled(params={"stop": [""]}), "stop must be"),
    ],
)
def test_what_is_wrong_with_a_sample_is_said(asked: asks.SampleRequest, message: str):
    with pytest.raises(RequestRefusedError, match=message) as caught:
        asks.sample_of(asked, "", SERVED)
    assert caught.value.status == 400


def test_a_request_has_a_size():
    long = b'{"session_id": "s", "type": "' + b"x" * (1 << 16) + b'"}'
    with pytest.raises(RequestRefusedError, match="it may have 65536"):
        asks.read(long, asks.OfSession)


def test_an_unknown_field_is_refused_by_its_name():
    with pytest.raises(RequestRefusedError, match="`later`"):
        asks.read(b'{"model_id": "m", "later": 1}', asks.OfModel)


def test_names_of_weights_are_no_paths():
    saved = types.SaveWeightsRequest(model_id="m", seq_id=12, path="../x")
    with pytest.raises(RequestRefusedError, match="letters, digits"):
        asks.name_of_save(asks.read(of_sdk(saved), asks.SaveWeightsRequest))
    unnamed = asks.SaveWeightsRequest(model_id="m", seq_id=12)
    assert asks.name_of_save(unnamed) == "000012"
    brief = asks.SaveWeightsRequest(model_id="m", seq_id=12, ttl_seconds=10)
    with pytest.raises(RequestRefusedError, match="ttl_seconds must be from 3600"):
        asks.name_of_save(brief)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_the_sdk_reads_losses():
    losses = Losses(
        logprobs=(floats(-1.0, -2.0), floats(-3.0, -4.0, -5.0, -6.0)),
        widths=(1, 2),
        metrics={"loss:sum": 2.5},
    )
    found: Any = deserialize_proto_response(write_losses(losses), types.ForwardBackwardOutput)
    assert found.metrics == {"loss:sum": 2.5}
    first, second = (output["logprobs"] for output in found.loss_fn_outputs)
    assert (list(first.data), first.shape) == ([-1.0, -2.0], [2])
    assert (list(second.data), second.shape) == ([-3.0, -4.0, -5.0, -6.0], [2, 2])


def test_the_sdk_reads_answers():
    ids = np.array([3, 4], "<i4").tobytes()
    top = Top(k=1, ids=ids, logprobs=floats(-0.5, -0.75))
    answer = SampledAnswer(tokens=ids, logprobs=floats(-1.0, -2.0), finish="length", top=top)
    given = Sampled(
        version="v",
        answers=(answer,),
        prompt_logprobs=floats(float("nan"), -0.25),
        prompt_top=top,
        cached_tokens=5,
    )
    found: Any = deserialize_proto_response(write_sampled(given), types.SampleResponse)
    (sequence,) = found.sequences
    assert (sequence.tokens, sequence.logprobs) == ([3, 4], [-1.0, -2.0])
    assert sequence.stop_reason == "length"
    assert found.prompt_logprobs == [None, -0.25]
    assert found.topk_prompt_logprobs_np.token_ids.tolist() == [[3], [4]]
    assert sequence.topk_logprobs_np.logprobs.tolist() == [[-0.5], [-0.75]]
    assert found.prompt_cache_hit_tokens == 5
