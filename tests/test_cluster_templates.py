"""The templates for clusters in docs/: the Slurm array as `sbatch` would run it, and the Kubernetes
objects.
"""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from small_repository import programs as forked

sys.path.append(str(Path(__file__).parent / "data"))
from test_shards import files_of, prepared, write_set

DOCS = Path(__file__).parents[1] / "docs"
SBATCH = """#!/bin/sh
# Run the tasks of an array side by side, as Slurm does on as many hosts.
export SLURM_ARRAY_JOB_ID=$$ SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_COUNT=2 SLURM_CPUS_PER_TASK=1
SLURM_ARRAY_TASK_ID=1 sh "$1" & other=$!
SLURM_ARRAY_TASK_ID=0 sh "$1" || exit 1
wait $other
"""


@pytest.fixture
def project(tmp_path):
    """Create a project with four shards, and programs that replace a cluster's."""
    data = write_set(tmp_path / "in", "tar")
    (tmp_path / "params.yaml").write_text(
        yaml.safe_dump({"data": data.model_dump(mode="json", exclude_defaults=True)})
    )
    (tmp_path / "state/keys").mkdir(parents=True)
    (tmp_path / "state/keys/set").write_bytes(bytes(range(32)))
    programs = tmp_path / "bin"
    programs.mkdir()
    # `torchrun` and the processes that it starts run by fork, and import nothing again
    module = str(forked() / "module")
    torchrun = f'#!/bin/sh\nexec {shlex.quote(module)} -m torch.distributed.run "$@"\n'
    for name, text in {
        "sbatch": SBATCH,
        "hostname": "#!/bin/sh\necho localhost\n",
        "torchrun": torchrun,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "SFUMATO_STATE": str(tmp_path / "state"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": module,
    }
    return tmp_path, data, environment


def test_a_slurm_array_prepares_the_set_of_one_process(project):
    folder, data, environment = project
    subprocess.run(
        ["sbatch", DOCS / "prepare-slurm.sh"], cwd=folder, env=environment, check=True, timeout=300
    )
    assert files_of(folder / "state") == prepared(data, folder / "one")
    assert not [*(folder / "state/launches").iterdir()]


def objects() -> list[dict]:
    return [*yaml.safe_load_all((DOCS / "prepare-kubernetes.yaml").read_text())]


def test_the_kubernetes_objects_are_valid_and_belong_together():
    service, policy, job = objects()
    for one in (service, policy, job):
        kubernetes_validate.validate(one, "1.30", strict=True)
    pods = {"job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == pods
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job | {"spec": {"completions": "four"}}, "1.30", strict=True)


def test_the_command_of_the_kubernetes_pods_prepares_the_set(project):
    folder, data, environment = project
    (container,) = objects()[-1]["spec"]["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = {"--nnodes": "2", "--nproc-per-node": "1", "--rdzv-endpoint": f"localhost:{port}"}
    words = [
        f"{name}={here[name]}" if (name := word.split("=")[0]) in here else word
        for word in container["command"]
    ]
    pods = [subprocess.Popen(words, cwd=folder, env=environment) for _ in range(2)]
    assert [pod.wait(300) for pod in pods] == [0, 0]
    assert files_of(folder / "state") == prepared(data, folder / "one")
