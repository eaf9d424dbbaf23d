"""The files in deploy/ are valid and agree with one another; no container is built here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sipipe.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))


def run(tool, *arguments):
    pytest.importorskip("kubernetes_validate", reason="the linters of deploy/: see make setup")
    done = subprocess.run(
        [TOOLS / tool, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles(file):
    run("hadolint", "--failure-threshold", "info", str(file))
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", file.read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name


def test_compose():
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml"))
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "compose.yaml").read_text()
    for service in yaml.safe_load(text)["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source


def test_kubernetes():
    run("kubernetes-validate", "--strict", str(DEPLOY / "kubernetes.yaml"))


def test_they_agree():
    cuda = (DEPLOY / "cuda.Dockerfile").read_text()
    assert f"FROM vllm/vllm-openai:v{SUPPORTED_VLLM[-1]}\n" in cuda
    compose = (DEPLOY / "compose.yaml").read_text()
    kubernetes = (DEPLOY / "kubernetes.yaml").read_text()
    for text, grace in (
        (compose, r"stop_grace_period: (\d+)s"),
        (kubernetes, r"terminationGracePeriodSeconds: (\d+)"),
    ):
        drain = re.search(r'"--shutdown-timeout", "(\d+)"', text)
        assert int(re.search(grace, text)[1]) > int(drain[1])
