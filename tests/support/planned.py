"""What planner's tests ask: a run of one shape, on hosts of eight GPUs."""

from typing import Any

from slipstream.deploy.config import RunConfig, run_config
from slipstream.deploy.predict.laws.gpus import Cluster, gpu_named, gpu_of
from slipstream.deploy.predict.laws.shapes import shape_folder
from slipstream.deploy.predict.size.proposals import PlanRequest
from slipstream.wire.models.hf_config import HfConfig, load_hf_config

H100 = Cluster(gpu=gpu_named("H100"))


def table_of(model: str, **sections: dict[str, Any]) -> dict[str, Any]:
    run = {"model": str(shape_folder(model)), "groups_per_step": 32, "group_size": 8}
    sampling = {"max_prompt_tokens": 1024, "max_response_tokens": 3072}
    table: dict[str, Any] = {"run": run, "sampling": sampling, "data": {"file": "train.jsonl"}}
    return table | {name: {**table.get(name, {}), **values} for name, values in sections.items()}


def config_of(model: str, **sections: dict[str, Any]) -> RunConfig:
    return run_config(table_of(model, **sections))


def shape_of(model: str) -> HfConfig:
    return load_hf_config(shape_folder(model))


def question_of(model: str, *, gib: float, **sections: dict[str, Any]) -> PlanRequest:
    return PlanRequest(
        config=config_of(model, **sections),
        hf=shape_of(model),
        cluster=Cluster(gpu=gpu_of(gib)),
        gpus=64,
        prompt_tokens=512,
        response_tokens=1536,
    )
