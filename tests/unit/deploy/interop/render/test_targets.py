"""Every setting of a target ends up in what is written for it."""

from pathlib import Path

import pytest

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.compose import render_compose
from slipstream.deploy.interop.render.kubernetes import render_kubernetes
from slipstream.deploy.interop.render.skypilot import render_skypilot
from slipstream.deploy.interop.render.slurm import render_slurm
from tests.support.config_to_render import config_to_render


def texts_of(config: RunConfig, target: str, folder: Path) -> str:
    match target:
        case "slurm":
            files = render_slurm(config, out=folder, folder=folder)
        case "kubernetes":
            files = render_kubernetes(config, config.table)
        case "compose":
            files = render_compose(
                config, config.table, out=folder / "out", folder=folder, user="1000:1000", gpus=8
            )
        case _:
            files = render_skypilot(config, config.table, out=folder)
    return "\n".join(files.values())


@pytest.mark.parametrize(
    ("target", "setting", "value", "written"),
    [
        ("slurm", "qos", "high", "--qos=high"),
        ("slurm", "grace_s", 777, "--signal=B:TERM@777"),
        ("kubernetes", "broker_grace_s", 771, "terminationGracePeriodSeconds: 771"),
        ("kubernetes", "generator_grace_s", 772, "terminationGracePeriodSeconds: 772"),
        ("kubernetes", "learner_grace_s", 773, "terminationGracePeriodSeconds: 773"),
        ("kubernetes", "reward_worker_grace_s", 774, "terminationGracePeriodSeconds: 774"),
        ("kubernetes", "shared_claim", "lustre", "claimName: lustre"),
        ("kubernetes", "storage_class", "fast", "storageClassName: fast"),
        ("compose", "redis_image", "redis:8.2", "image: redis:8.2"),
        ("compose", "grace_s", 775.0, "stop_grace_period: 775s"),
        ("compose", "save_grace_s", 776, "stop_grace_period: 776s"),
        ("skypilot", "accelerators", "A100:8", "accelerators: A100:8"),
        ("skypilot", "cloud", "gcp", "cloud: gcp"),
        ("skypilot", "use_spot", True, "use_spot: true"),
        ("skypilot", "workdir", "~/checkout", "workdir: ~/checkout"),
    ],
)
def test_a_setting_of_a_target_is_written(
    tmp_path: Path, target: str, setting: str, value: object, written: str
):
    sections = {"run": {"dir": str(tmp_path)}, "broker": {"redis": {"url": "redis://redis:6379"}}}
    before = config_to_render(tmp_path, count=3, **sections)
    config = config_to_render(tmp_path, count=3, **sections, deploy={target: {setting: value}})
    text = texts_of(config, target, tmp_path).replace('"', "")
    assert written in text
    assert written not in texts_of(before, target, tmp_path).replace('"', "")
