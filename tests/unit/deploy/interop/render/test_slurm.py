"""The batch script: its options, its quoting, and where roles go."""

import re
import subprocess
from pathlib import Path

import pytest

from slipstream.deploy.config import RunConfig
from slipstream.deploy.interop.render.layout import NodeGpus, NodeLayout, layout_of
from slipstream.deploy.interop.render.slurm import job_text, render_slurm
from slipstream.wire.errors import ConfigError
from tests.support.config_to_render import config_to_render


def config_of(folder: Path, **sections: dict[str, object]) -> RunConfig:
    sections["run"] = {"dir": "runs", **sections.get("run", {})}
    return config_to_render(folder, count=6, **sections)


def variables(text: str, *names: str) -> list[str]:
    """Return what bash makes of variables of the script's head, and that it can read it all."""
    head = text.partition("# ---- from here on")[0]
    printed = "".join(f'\nprintf "%s\\n" "${{{name}}}"' for name in names)
    done = subprocess.run(
        ["bash", "-uec", head + printed], capture_output=True, text=True, check=True
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return done.stdout.splitlines()


def test_paths_with_spaces_quotes_and_dollars_stay_whole(tmp_path: Path):
    config = config_of(tmp_path, run={"dir": "$(touch bad) 'runs'"})
    odd = Path('/home/Jo\'s "files" $HOME/`x`')
    text = render_slurm(config, out=odd / "job", folder=odd)["job.sbatch"]
    assert variables(text, "work", "config", "run_folder") == [
        str(odd),
        str(odd / "job" / "run.toml"),
        str(odd / "$(touch bad) 'runs'" / "demo"),
    ]


def test_engines_fill_the_gpus_beside_the_learner_then_other_nodes(tmp_path: Path):
    config = config_of(tmp_path, generators={"sglang": {"tp_size": 2}})
    text = render_slurm(config, out=tmp_path, folder=tmp_path)["job.sbatch"]
    places = ["0:4,5", "0:6,7", "1:0,1", "1:2,3", "1:4,5", "1:6,7"]
    assert variables(text, "generators[*]", "learner_gpus") == [" ".join(places), "0,1,2,3"]
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert "--nodes=2" in options
    assert "--gpus-per-node=8" in options
    assert {"--exclusive", "--mem=0", "--requeue"} <= set(options)
    assert "--signal=B:TERM@900" in options


def test_chosen_options_are_handed_on(tmp_path: Path):
    slurm = {"partition": "gpu", "account": "rl-7", "time_limit": "1-12", "options": ["--nice=5"]}
    config = config_of(tmp_path, deploy={"slurm": {**slurm, "setup": ["module load cuda"]}})
    text = render_slurm(config, out=tmp_path, folder=tmp_path)["job.sbatch"]
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert {"--partition=gpu", "--account=rl-7", "--time=1-12", "--nice=5"} <= set(options)
    assert "setup() {\n    module load cuda\n}" in text


def keeper(text: str) -> str:
    """Return the script's function that keeps a role running."""
    return "keep() {" + text.partition("keep() {")[2].partition("\n}\n")[0] + "\n}\n"


def test_setup_lines_may_read_variables_that_are_not_set(tmp_path: Path):
    setup = ['export PYTHONPATH="/opt/tools:$NOT_SET_ANYWHERE"']  # as conda and modules do
    config = config_of(tmp_path, deploy={"slurm": {"setup": setup}})
    text = render_slurm(config, out=tmp_path, folder=tmp_path)["job.sbatch"]
    start = text.partition("export OMP_NUM_THREADS")[0]
    assert subprocess.run(["bash", "-c", start], check=False).returncode == 0


def test_a_role_that_ran_for_long_is_started_again_after_a_second(tmp_path: Path):
    """Its pause would double over days; here four times with a window that always has passed."""
    text = render_slurm(config_of(tmp_path), out=tmp_path, folder=tmp_path)["job.sbatch"]
    script = f"""
run_folder={tmp_path} max_restarts=2 restart_window_s=-1 starts=0
sleep() {{ echo "pause $1"; }}
work() {{ echo start >>"$run_folder/starts"; [ "$(wc -l <"$run_folder/starts")" -gt 4 ]; }}
mkdir "$run_folder/logs"
{keeper(text)}
keep learner '' work
"""
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["pause 1"] * 4


def test_what_slurm_would_not_take_is_refused(tmp_path: Path):
    for slurm, why in [
        ({"partition": "gpu --wrap=x"}, r"deploy.slurm.partition must be one word"),
        ({"options": ["--mem=0\nrm -rf /"]}, r"deploy.slurm.options must be like"),
        ({"options": ["-n 5"]}, r"deploy.slurm.options must be like"),
        ({"gpus_per_node": 2}, r"deploy.slurm.gpus_per_node = 2, but the learner has 4 ranks"),
    ]:
        config = config_of(tmp_path, deploy={"slurm": slurm})
        with pytest.raises(ConfigError, match=why):
            render_slurm(config, out=tmp_path, folder=tmp_path)


def test_a_time_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="time_limit"):
        config_of(tmp_path, deploy={"slurm": {"time_limit": "tomorrow"}})


def test_a_learner_on_two_nodes_has_one_step_over_both(tmp_path: Path):
    learner = (NodeGpus(0, (0, 1)), NodeGpus(1, (0, 1)))
    layout = NodeLayout(learner, (NodeGpus(1, (2,)),), reward_workers=0)
    text = job_text(config_of(tmp_path), layout, out=tmp_path, folder=tmp_path)
    assert variables(text, "learner_nodes", "learner_gpus", "generators[*]") == ["2", "0,1", "1:2"]
    assert '--rendezvous "$head:$((port + 3))"' in text


def test_on_cpus_nodes_are_counted_by_generators(tmp_path: Path):
    config = config_of(tmp_path, generators={"device": "cpu", "count": 3})
    layout = layout_of(config, gpus_per_node=0, generators_per_node=2, setting="x")
    assert [place.node for place in layout.generators] == [0, 0, 1]
    assert layout.num_nodes == 2
