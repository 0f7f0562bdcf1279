"""Site settings and the commands that are made of them."""

import subprocess
import sys

import pytest

from kitty.errors import KittyError
from kitty.launcher import Run, launch
from kitty.paths import configs_dir
from kitty.site import Site, Wanted, allocated_cores, allocated_memory_mb, load_site, single_job
from kitty.workflow import Plan


@pytest.fixture
def site_file(tmp_path, monkeypatch):
    path = tmp_path / "site.yaml"
    monkeypatch.setenv("KITTY_SITE", str(path))
    return path


def test_the_shipped_site_file_leaves_everything_to_the_cluster():
    assert load_site() == Site(None, None, None, "--nv", 50)


def test_a_site_file_of_one_s_own_is_taken_and_its_image_counts_from_there(site_file):
    site_file.write_text("account: lab\nimage: images/kitty.sif\njobs: 3\n")
    found = load_site()
    assert (found.account, found.partition, found.jobs) == ("lab", None, 3)
    assert found.image == str(site_file.parent / "images" / "kitty.sif")


@pytest.mark.parametrize("content", ["acount: lab\n", "jobs: 0\n", "a: [\n"])
@pytest.mark.parametrize("profile", ["default", "slurm", "slurm-single"])
def test_a_wrong_site_file_stops_a_run_before_it_starts(
    site_file, content, profile, monkeypatch, tmp_path
):
    site_file.write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KittyError, match="site file"):
        launch(Run("tiny", profile=profile))


def test_an_unknown_profile_is_refused_with_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KittyError, match="default, slurm, slurm-single"):
        launch(Run("tiny", profile="pbs"))


def test_on_slurm_cores_and_memory_come_from_the_rules():
    words = Run("tiny", profile="slurm").command()
    assert words[words.index("--workflow-profile") + 1] == str(configs_dir() / "profiles" / "slurm")
    assert "--cores" not in words
    assert "--resources" not in words
    words = Run("tiny").command()
    assert words[words.index("--cores") + 1] == "all"


def test_one_job_starts_the_image_with_the_site_s_arguments(tmp_path):
    site = Site("lab", "gpu", "/images/kitty.sif", "--nv --bind /scratch", 50)
    plan = Plan.load("tiny", tmp_path)
    command = single_job(site, plan, "out", Wanted(8, 32000, 1, 90), wait=True)
    script = str(configs_dir() / "profiles" / "slurm-single" / "job.sh")
    options, inner = command[: command.index(script)], command[command.index(script) + 1 :]
    assert options == [
        *("sbatch", "--job-name=kitty-tiny", "--account=lab", "--partition=gpu"),
        *("--cpus-per-task=8", "--mem=32000M", "--gpus=1", "--time=90"),
        *("--output=out/slurm-%j.log", "--wait"),
    ]
    assert inner == [
        *("apptainer", "exec", "--nv", "--bind", "/scratch", "/images/kitty.sif"),
        *("kitty", "run", "tiny", "--results", "out", "--profile", "slurm-single"),
    ]


def test_one_job_without_an_image_uses_this_installation(tmp_path):
    plan = Plan.load("tiny", tmp_path)
    command = single_job(Site(), plan, "out", Wanted(1, 1000, 0, 10), wait=False)
    assert "--gpus=1" not in command
    assert command[-9:-6] == [sys.executable, "-m", "kitty"]


@pytest.mark.parametrize(
    "environ, cores, memory",
    [
        ({}, "all", None),
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_NODE": "8000"}, "4", 8000),
        ({"SLURM_CPUS_ON_NODE": "2", "SLURM_MEM_PER_CPU": "1000"}, "2", 2000),
    ],
)
def test_a_job_s_share_of_the_node_is_read_from_its_environment(environ, cores, memory):
    assert allocated_cores(environ) == cores
    assert allocated_memory_mb(environ) == memory


def script(tmp_path, *command):
    path = configs_dir() / "profiles" / "slurm-single" / "job.sh"
    return subprocess.Popen(
        [str(path), *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_the_job_s_status_is_that_of_its_command(tmp_path):
    process = script(tmp_path, "bash", "-c", "exit 3")
    process.communicate(timeout=30)
    assert process.returncode == 3


CLEANS = """
import signal, sys, time
def end(number, frame):
    print("cleaned", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(30)
"""


def test_a_job_asked_to_end_lets_its_command_end_first(tmp_path):
    process = script(tmp_path, sys.executable, "-c", CLEANS)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    told, _ = process.communicate(timeout=20)
    assert told == "cleaned\n"
    assert process.returncode == 5


@pytest.mark.parametrize(
    "content, expected",
    [
        ("account: lab\njobs: 7\n", {"jobs": "7"}),
        ("image: /a.sif\napptainer_args: ''\n", {"software-deployment-method": "apptainer"}),
        ("image: /a.sif\n", {"apptainer-args": "--nv"}),
    ],
)
def test_the_slurm_profile_follows_the_site_file(site_file, content, expected):
    profiles = pytest.importorskip("snakemake.profiles")
    site_file.write_text(content)
    with (configs_dir() / "profiles" / "slurm" / "config.yaml").open() as file:
        found = profiles.ProfileConfigFileParser().parse(file)
    assert found["executor"] == "slurm"
    assert {name: found[name] for name in expected} == expected
    assert ("apptainer-args" in found) == ("apptainer-args" in expected)
    assert ("slurm_account=lab" in found["default-resources"]) == ("account" in content)
