"""Stage 6: `slipstream run` with random weights of 0.5B parameters, its memory beside the estimate.

On a CPU the shape is small and nothing shows how much memory a GPU would have used.
"""

import json
import shutil
from pathlib import Path

from benchmarks.device.engines import has_cuda
from benchmarks.device.loops import run_loop
from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from slipstream.deploy.config import run_config
from slipstream.deploy.examples.addition import prepare
from slipstream.deploy.predict.memory.gpu import (
    GIB,
    generator_memory,
    kv_bytes_per_token,
    learner_memory,
)
from slipstream.wire.models.hf_config import load_hf_config
from slipstream.wire.settings.load import load_table
from tests.support.blank_model import write_blank_model
from tests.support.random_llama import write_random_weights

_STEPS = 20 if has_cuda() else 4
_HALF_B: dict[str, object] = {  # of Qwen2.5-0.5B, as a Llama
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_CONTEXT_GIB = 0.6  # of CUDA for each process that uses it: the driver's, and kernels
_MISJUDGED = 1.3  # of the estimate, that may be used


def work(report: Report, out: Path) -> None:
    folder = (out / "shape").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)  # its problems
    model = folder / "random"
    write_blank_model(model, hidden=64, layers=2)
    if has_cuda():
        config = json.loads((model / "config.json").read_text()) | _HALF_B
        (model / "config.json").write_text(json.dumps(config))
    write_random_weights(model, scale=0.02, seed=6)
    hf = load_hf_config(model)
    report.fact("parameters", hf.num_parameters)
    settings: dict[str, object] = {
        "run.model": model,
        "data.file": folder / "train.jsonl",
        "eval.file": folder / "held_out.jsonl",
        "eval.every_steps": _STEPS,
        "broker.drop_zero_variance": False,  # random weights are never right
    }
    _, most = run_loop(report, folder, settings, steps=_STEPS, kills={})
    with report.part("memory"):
        if not has_cuda():
            raise Skipped(ON_A_CPU)
        config = run_config(load_table(folder / "runs" / "device" / "resolved.toml"))
        learner = sum(part.num_bytes for part in learner_memory(hf, config.learner))
        weights, *_ = generator_memory(hf, config)
        cached = int(config.generators.generators.sglang["max_total_tokens"])
        engine = weights.num_bytes + cached * kv_bytes_per_token(hf)
        expected = (learner + engine) / GIB + 2 * _CONTEXT_GIB
        report.fact("learner by the estimate, GiB", learner / GIB)
        report.fact("engine by the estimate, GiB", engine / GIB)
        report.fact("most GPU memory of all, GiB", most / GIB)
        used = most / GIB / expected
        report.at_most("memory used of the estimate", used, "x", needs=_MISJUDGED)


if __name__ == "__main__":
    run_stage("shape", work)
