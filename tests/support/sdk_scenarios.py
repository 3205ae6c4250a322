"""Clients of a command server by the unmodified SDK, in a process of their own.

Usage: sdk_scenarios SCENARIO JSON-OF-ARGUMENTS

A line {"do": WHAT} asks the test for something, such as the death of a role, and waits for a line.
The last line is what the scenario returns.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker
from tinker import types

PROMPT = [3, 4, 13]
SMOOTH = {"learning_rate": 1e-3, "beta2": 0.95, "eps": 1e-2, "grad_clip_norm": 1.0}
ADAM = {"learning_rate": 1e-3, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 1.0}


def ask_test(what: str) -> None:
    sys.stdout.write(json.dumps({"do": what}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def tensor(values: Sequence[float], dtype: str) -> Any:  # noqa: ANN401 of the SDK
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])


def datum(tokens: list[int], weight: float = 1.0) -> Any:  # noqa: ANN401 of the SDK
    inputs = {
        "target_tokens": tensor(tokens[1:], "int64"),
        "weights": tensor([weight] * (len(tokens) - 1), "float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def batch(number: int) -> list[Any]:
    return [datum([3 + (number * 7 + i * j) % 17 for j in range(6 + i)]) for i in range(3)]


def logprobs_of(output: Any) -> list[list[float]]:  # noqa: ANN401 of the SDK
    return [[float(x) for x in one["logprobs"].data] for one in output.loss_fn_outputs]


def version_of(sampler: Any) -> str:  # noqa: ANN401 of the SDK
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=4, seed=1)
    (sequence,) = sampler.sample(prompt, 1, params).result().sequences
    return str(sequence.sequence_id).partition("/")[0]


def loop(url: str, key: str, model: str, *, kills: bool) -> dict[str, Any]:
    """Train, save, sample, replay and load, with every role killed once in the middle."""

    def kill(role: str) -> None:
        if kills:
            ask_test(role)

    own = tinker.ServiceClient(base_url=url, api_key=key)
    trained = own.create_lora_training_client(base_model=model, rank=4, seed=11).result()
    losses = [trained.forward_backward(batch(n), "cross_entropy") for n in (0, 1)]
    seen = [loss.result().metrics["loss:sum"] for loss in losses]
    kill("learner")  # with gradients that are in no file
    step = trained.optim_step(types.AdamParams(**ADAM))
    third = trained.forward_backward(batch(2), "cross_entropy")
    kill("server")
    seen += [step.result().metrics["grad_norm"], third.result().metrics["loss:sum"]]
    saved = trained.save_state("one").result()
    trained.optim_step(types.AdamParams(**ADAM)).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    future = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=24, seed=5))
    kill("engine")
    answers, replayed = future.result().sequences, []
    for answer in answers:  # by the weights that its label names
        data = [datum(PROMPT + answer.tokens, 0.0)]
        (found,) = logprobs_of(trained.forward(data, "cross_entropy").result())
        replayed.append(found[len(PROMPT) - 1 :])
    text = types.ModelInput.from_ints(PROMPT + answers[-1].tokens)
    scored = sampler.compute_logprobs(text).result()
    again = own.create_training_client_from_state_with_optimizer(saved.path).result()
    again.forward_backward(batch(2), "cross_entropy").result()
    other = own.create_training_client_from_state(saved.path).result()
    for one in (again, other):
        one.optim_step(types.AdamParams(**ADAM)).result()
    sampled = [s.save_weights_and_get_sampling_client().result() for s in (again, other)]
    labels = {answer.sequence_id.partition("/")[0] for answer in answers}
    own.close("success").result()
    return {
        "seen": seen,
        "version": version_of_id(labels),
        "tokens": [answer.tokens for answer in answers],
        "logprobs": [answer.logprobs for answer in answers],
        "replayed": replayed,
        "scored": scored,
        "loaded": [str(one._sampling_session_id) for one in sampled],
    }


def version_of_id(labels: set[str]) -> str:
    (label,) = labels
    return label


def refusals(url: str, key: str, other_key: str, model: str, weights: str) -> dict[str, str]:
    """Do what is wrong, and what is right after it; return what was said, by what was wrong.

    ``weights`` is the server's folder of checkpoints.
    """
    own = tinker.ServiceClient(base_url=url, api_key=key)
    other = tinker.ServiceClient(base_url=url, api_key=other_key)
    said: dict[str, str] = {}

    def said_of(what: str, call: Any) -> None:  # noqa: ANN401 whatever fails
        try:
            call()
            said[what] = "nothing"
        except Exception as error:  # noqa: BLE001 its kind is compared
            said[what] = f"{type(error).__name__}: {error}"

    create = own.create_lora_training_client
    said_of("rank", lambda: create(base_model=model, rank=9).result())
    said_of("base", lambda: create(base_model="another", rank=4).result())
    trained = create(base_model=model, rank=4).result()
    said_of("loss", lambda: trained.forward_backward(batch(0), "gspo").result())
    bad = datum([3, 4, 5])
    bad.loss_fn_inputs["weights"] = tensor([1.0], "float32")
    said_of("shape", lambda: trained.forward_backward([bad], "cross_entropy").result())
    for what, adam in (("adam", {"beta1": 1.0}), ("rate", {"learning_rate": float("nan")})):
        said_of(what, lambda: trained.optim_step(types.AdamParams(**adam)).result())  # noqa: B023
    said_of("load", lambda: trained.load_state("tinker://no/weights/x").result())
    vast = {"logprobs": [-1e4] * 3, "advantages": [1.0] * 3}
    inputs = {name: tensor(values, "float32") for name, values in vast.items()}
    infinite = types.Datum(
        model_input=types.ModelInput.from_ints([3, 4, 5]),
        loss_fn_inputs={"target_tokens": tensor([4, 5, 6], "int64"), **inputs},
    )
    by_ratio = "importance_sampling"
    said_of("infinite", lambda: trained.forward_backward([infinite], by_ratio).result())
    fine = trained.forward_backward(batch(0), "cross_entropy").result()
    said["next"] = str(fine.metrics["loss:sum"] > 0)
    path = trained.save_weights_for_sampler("mine").result().path
    said_of("other's", lambda: other.create_sampling_client(model_path=path).result())
    state = trained.save_state("state").result().path
    said_of("other's state", lambda: other.create_training_client_from_state(state).result())
    for file in Path(weights).iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    said_of("damaged", lambda: own.create_training_client_from_state(state).result())
    stranger = tinker.ServiceClient(base_url=url, api_key="tml-guessed")
    said_of("key", lambda: stranger.create_sampling_client(base_model=model).result())
    base = own.create_sampling_client(base_model=model).result()
    said["base version"] = version_of(base)
    rest = tinker.RestClient(base_url=url, api_key=key)
    listed = rest.list_checkpoints(trained.model_id).result().checkpoints
    said["listed"] = " ".join(sorted(one.checkpoint_id for one in listed))
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_user_checkpoints().result().checkpoints
    said["left"] = " ".join(one.checkpoint_id for one in left)
    run = rest.get_training_run(trained.model_id).result()
    said["run"] = f"{run.lora_rank} {run.last_checkpoint.checkpoint_id}"
    for one in (own, other):
        one.close("success").result()
    return said


def trained_losses(url: str, key: str, model: str, losses: list[Any]) -> dict[str, Any]:
    """Train two steps by each of several losses, with given data; return figures and versions.

    A loss is its name, its options and data, each of tokens and inputs by name.
    """
    own = tinker.ServiceClient(base_url=url, api_key=key)
    found: dict[str, Any] = {}
    for name, options, data in losses:
        trained = own.create_lora_training_client(base_model=model, rank=4, seed=5).result()
        sampler = trained.save_weights_and_get_sampling_client().result()
        versions, figures = [version_path(sampler)], []
        for _ in range(2):
            given = [
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens),
                    loss_fn_inputs={
                        key: tensor(values, "int64" if key == "target_tokens" else "float32")
                        for key, values in inputs.items()
                    },
                )
                for tokens, inputs in data
            ]
            halves = [given[:2], given[2:]]
            outputs = [
                trained.forward_backward(half, name, options or None).result() for half in halves
            ]
            trained.optim_step(types.AdamParams(**SMOOTH)).result()
            total = sum(output.metrics["loss:sum"] for output in outputs)
            figures.append([total, [row for output in outputs for row in logprobs_of(output)]])
            sampler = trained.save_weights_and_get_sampling_client().result()
            versions.append(version_path(sampler))
        found[name] = {"figures": figures, "versions": versions}
    return found


def tenant_loop(url: str, key: str, model: str, seed: int, steps: int, stop: str) -> dict[str, Any]:
    """Train, sample and replay for so many steps; 0 is until there is a file ``stop``."""
    own = tinker.ServiceClient(base_url=url, api_key=key)
    trained = own.create_lora_training_client(base_model=model, rank=4, seed=seed).result()
    seen: list[Any] = []
    prompt = types.ModelInput.from_ints(PROMPT)
    while len(seen) < steps if steps else not Path(stop).exists():
        number = 10 * seed + len(seen)
        losses = [trained.forward_backward(batch(number + n), "cross_entropy") for n in (0, 1)]
        step = trained.optim_step(types.AdamParams(**ADAM))
        row: list[Any] = [loss.result().metrics["loss:sum"] for loss in losses]
        row.append((step.result().metrics or {})["grad_norm"])
        if len(seen) % 4 == 0:
            sampler = trained.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=12, seed=number)
            (answer,) = sampler.sample(prompt, 1, params).result().sequences
            data = [datum(PROMPT + answer.tokens, 0.0)]
            (found,) = logprobs_of(trained.forward(data, "cross_entropy").result())
            replayed = found[len(PROMPT) - 1 :]
            apart = max(abs(a - b) for a, b in zip(replayed, answer.logprobs, strict=True))
            row += [answer.tokens, answer.sequence_id.partition("/")[0], apart < 1e-4]
        seen.append(row)
    sampler = trained.save_weights_and_get_sampling_client().result()
    own.close("success").result()
    return {"seen": seen, "sampler": version_path(sampler)}


def version_path(sampler: Any) -> str:  # noqa: ANN401 of the SDK
    return str(sampler._sampling_session_id)


def main() -> None:
    """Play what the command line names."""
    scenario, arguments = sys.argv[1:]
    given = json.loads(Path(arguments).read_text() if arguments.endswith(".json") else arguments)
    sys.stdout.write(json.dumps({"end": globals()[scenario](**given)}) + "\n")


if __name__ == "__main__":
    main()
