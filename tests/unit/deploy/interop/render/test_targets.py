"""Every setting of a target ends up in what is written for it."""

from pathlib import Path

import pytest

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.compose import render_compose
from slipstream.deploy.interop.render.kubernetes import render_kubernetes
from slipstream.deploy.interop.render.skypilot import render_skypilot
from slipstream.deploy.interop.render.slurm import render_slurm
from slipstream.deploy.targets import ComposeTable, KubernetesTable, SkyPilotTable, SlurmTable
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


ROWS: list[tuple[str, str, object, str]] = [
    ("slurm", "partition", "gpu", "--partition=gpu"),
    ("slurm", "account", "rl", "--account=rl"),
    ("slurm", "qos", "high", "--qos=high"),
    ("slurm", "time_limit", "1-12", "--time=1-12"),
    ("slurm", "gpus_per_node", 5, "--gpus-per-node=5"),
    ("slurm", "grace_s", 777, "--signal=B:TERM@777"),
    ("slurm", "port", 7000, "\nport=7000\n"),
    ("slurm", "setup", ("module load cuda",), "    module load cuda\n"),
    ("slurm", "options", ("--nice=5",), "#SBATCH --nice=5"),
    ("kubernetes", "image", "sl:2", "image: sl:2"),
    ("kubernetes", "images", {"learner": "sl:learner"}, "image: sl:learner"),
    ("kubernetes", "namespace", "rl", "namespace: rl,"),
    ("kubernetes", "storage_class", "fast", "storageClassName: fast"),
    ("kubernetes", "storage", "7Gi", "requests: {storage: 7Gi}"),
    ("kubernetes", "shared_claim", "lustre", "claimName: lustre"),
    ("kubernetes", "shared_memory", "9Gi", "sizeLimit: 9Gi"),
    ("kubernetes", "user", 77, "runAsUser: 77"),
    ("kubernetes", "max_generators", 9, "maxReplicas: 9"),
    ("kubernetes", "ready_groups", 13, "clamp_max(13 /"),
    ("kubernetes", "broker_grace_s", 771, "terminationGracePeriodSeconds: 771"),
    ("kubernetes", "generator_grace_s", 772, "terminationGracePeriodSeconds: 772"),
    ("kubernetes", "learner_grace_s", 773, "terminationGracePeriodSeconds: 773"),
    ("kubernetes", "reward_worker_grace_s", 774, "terminationGracePeriodSeconds: 774"),
    ("compose", "image", "sl:2", "image: sl:2"),
    ("compose", "images", {"learner": "sl:learner"}, "image: sl:learner"),
    ("compose", "redis_image", "redis:8.2", "image: redis:8.2"),
    ("compose", "mounts", ("/data",), "- /data:/data:ro"),
    ("compose", "shared_memory", "9gb", "shm_size: 9gb"),
    ("compose", "grace_s", 775.0, "stop_grace_period: 775s"),
    ("compose", "save_grace_s", 776, "stop_grace_period: 776s"),
    ("skypilot", "cloud", "gcp", "cloud: gcp"),
    ("skypilot", "accelerators", "A100:8", "accelerators: A100:8"),
    ("skypilot", "nodes", 5, "num_nodes: 5"),
    ("skypilot", "use_spot", True, "use_spot: true"),
    ("skypilot", "workdir", "~/checkout", "workdir: ~/checkout"),
    ("skypilot", "setup", ("pip install sl",), "  pip install sl\n"),
    ("skypilot", "storage", "s3://b", "/shared: {source: s3://b,"),
    ("skypilot", "port", 7000, "\n  port=7000\n"),
]
ELSEWHERE = {
    ("slurm", "generators_per_node"),  # below: for CPUs
    ("kubernetes", "gpus_per_node"),  # test_kubernetes.py: refused if too small
    *((target, "overrides") for target in ("kubernetes", "compose", "skypilot")),  # test_render.py
}


@pytest.mark.parametrize(("target", "setting", "value", "written"), ROWS)
def test_a_setting_of_a_target_is_written(
    tmp_path: Path, target: str, setting: str, value: object, written: str
):
    sections = {"run": {"dir": str(tmp_path)}, "broker": {"redis": {"url": "redis://redis:6379"}}}
    before = config_to_render(tmp_path, count=3, **sections)
    config = config_to_render(tmp_path, count=3, **sections, deploy={target: {setting: value}})
    text = texts_of(config, target, tmp_path).replace('"', "")
    assert written in text
    assert written not in texts_of(before, target, tmp_path).replace('"', "")


def test_generators_share_a_node_without_gpus(tmp_path: Path):
    generators = {"device": "cpu"}
    for share, nodes in ((1, 4), (2, 2)):
        slurm = {"slurm": {"generators_per_node": share}}
        config = config_to_render(tmp_path, count=4, generators=generators, deploy=slurm)
        assert f"#SBATCH --nodes={nodes}\n" in texts_of(config, "slurm", tmp_path)


def test_no_setting_of_a_target_is_without_a_test():
    tables = {
        "slurm": SlurmTable,
        "kubernetes": KubernetesTable,
        "compose": ComposeTable,
        "skypilot": SkyPilotTable,
    }
    settings = {
        (name, field) for name, table in tables.items() for field in table.__struct_fields__
    }
    assert settings == {row[:2] for row in ROWS} | ELSEWHERE
