"""The files in deploy/ are valid and agree with one another; no container is built here."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sipipe.cli.parser import make_parser, parse_engine_command
from sipipe.cli.serve import add_host_options, hosts_of
from sipipe.observe import metrics
from sipipe.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
COMPOSE = ["compose.yaml", "prefill-compose.yaml"]
SECRETS = {"kubernetes": 1, "leaderworkerset": 1, "prefill-kubernetes": 2, "kuberay": 1}
"""How many times each has the tokens."""


def documents(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def services(name):
    (compose,) = documents(name)
    return compose["services"]


def deployments(name):
    """What a manifest says of the pods of each."""
    found = (one for one in documents(name) if one["kind"] == "Deployment")
    return {one["metadata"]["name"]: one["spec"]["template"] for one in found}


def check_pods(place, pods, service):
    """Those of a resource that Kubernetes itself does not know."""
    yaml = pytest.importorskip("yaml")
    whole = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods]
    for pod in whole:
        pod["metadata"] = {"name": "x", **pod["metadata"]}
    place.write_text(yaml.safe_dump_all([*whole, service]))
    run("kubernetes-validate", "--strict", str(place))


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


@pytest.mark.parametrize("name", COMPOSE)
def test_compose(name):
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / name))
    for service in services(name).values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_publishes_on_this_machine_alone(name):
    """Unless ADDRESS is set: a port without an address is everybody's."""
    published = [port for one in services(name).values() for port in one.get("ports", ())]
    assert published
    for port in published:
        assert port.startswith(("127.0.0.1:", "${ADDRESS:-127.0.0.1}:")), port


@pytest.mark.parametrize("name", ["kubernetes.yaml", "prefill-kubernetes.yaml"])
def test_kubernetes(name):
    run("kubernetes-validate", "--strict", str(DEPLOY / name))


def test_prefill():
    """Both files' engines agree on what the connector needs; the router's options are its own."""
    composed, pods = services("prefill-compose.yaml"), {}
    for name, template in deployments("prefill-kubernetes.yaml").items():
        (pods[name],) = template["spec"]["containers"]
    engines = [composed[name] for name in ("prefill", "decode-0", "decode-1")]
    said = [one["entrypoint"][2:] + one["command"][1:] for one in engines]
    said += [pods[f"sipipe-{name}"]["args"][1:] for name in ("prefill", "decode")]
    roles, agreed = [], []
    for words in said:
        _, _, rest = parse_engine_command(make_parser("serve", "", add_help=False), ["m", *words])
        option = "--kv-transfer-config="
        (connector,) = (json.loads(w.removeprefix(option)) for w in words if option in w)
        roles.append(connector.pop("kv_role").removeprefix("kv_"))
        agreed.append({*(word for word in words if option not in word), json.dumps(connector)})
        assert rest
    assert roles == ["producer", "consumer", "consumer", "producer", "consumer"]
    assert all(one == agreed[0] for one in agreed)
    router = composed["router"]
    for words in (router["entrypoint"] + router["command"],
                  pods["sipipe-router"]["command"] + pods["sipipe-router"]["args"]):  # fmt: skip
        assert words[:3] == ["python3", "deploy/prefill_router.py", "--host=0.0.0.0"]
        assert {word.split("=")[0] for word in words[3:]} == {"--prefill", "--decode"}


LEADER_WORKER_SET = {
    "size": int,
    "restartPolicy": ("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    "leaderTemplate": dict,
    "workerTemplate": dict,
}
"""What `spec.leaderWorkerTemplate` may have, of the fields that we use (leaderworkerset.x-k8s.io/v1)."""


def test_leader_worker_set(tmp_path):
    """The pods against Kubernetes' schema; the fields around them by name; the command parses."""
    group, service = documents("leaderworkerset.yaml")
    kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert (group["apiVersion"], group["kind"]) == kind
    assert set(group["spec"]) == {"replicas", "leaderWorkerTemplate"}
    template = group["spec"]["leaderWorkerTemplate"]
    for field, value in template.items():
        allowed = LEADER_WORKER_SET[field]
        assert value in allowed if isinstance(allowed, tuple) else isinstance(value, allowed)
    ranks = {"leaderTemplate": "0", "workerTemplate": "1"}
    for name, rank in ranks.items():
        check_pods(tmp_path / name, [template[name]], service)
        (container,) = template[name]["spec"]["containers"]
        command = json.dumps(container["args"]).replace("$(LWS_GROUP_SIZE)", "2")
        command = command.replace("$(LWS_WORKER_INDEX)", rank)
        words = json.loads(command.replace("$(LWS_LEADER_ADDRESS)", "127.0.0.1"))
        parser = make_parser("serve", "", add_help=False)
        add_host_options(parser)
        own, _, rest = parse_engine_command(parser, words)
        node, hosts = hosts_of(own)
        assert rest == ["Qwen/Qwen2.5-0.5B-Instruct", "-pp", "2"]
        assert (node, hosts) == (int(rank), {"count": 2, "address": "127.0.0.1"})
        assert ("--headless" in words) == (node > 0)
        assert container["env"][0]["name"] == "SIPIPE_SECRET"
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_kuberay(tmp_path):
    """The pods against Kubernetes' schema; the fields around them by name; the command parses."""
    job, service = documents("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) == {"entrypoint", "submissionMode", "backoffLimit", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) == {"rayStartParams", "template"}
    replicas = {"groupName", "replicas", "minReplicas", "maxReplicas"}
    assert set(group) == {"rayStartParams", "template"} | replicas
    check_pods(tmp_path / "pods", [head["template"], group["template"]], service)
    program, command, *words = job["spec"]["entrypoint"].split()
    assert (program, command) == ("sipipe", "serve")
    _, _, rest = parse_engine_command(make_parser("serve", "", add_help=False), words)
    assert rest[1:] == ["-pp", "2", "--distributed-executor-backend", "ray"]
    assert group["replicas"] == 1


def test_alerts_ask_for_what_is_exported():
    (alerts,) = documents("alerts.yml")
    monitor, rules = documents("prometheus-operator.yaml")
    assert rules["kind"] == "PrometheusRule"
    assert rules["spec"] == alerts
    exported = {
        name + "_total" * (metric.kind == "counter") for name, metric in metrics.METRICS.items()
    }
    (group,) = alerts["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(re.findall(r"sipipe_\w+", rule["expr"])) <= exported, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
    (scraped,) = documents("prometheus.yml")
    assert scraped["rule_files"] == ["alerts.yml"]
    # The alerts' `job`, in both.
    assert [job["job_name"] for job in scraped["scrape_configs"]] == ["sipipe"]
    assert (monitor["kind"], monitor["spec"]["jobLabel"]) == ("PodMonitor", "app")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (pod,) = deployments("kubernetes.yaml").values()
    chosen, _ = monitor["spec"]["selector"]["matchExpressions"]
    apps = {pod["metadata"]["labels"]["app"]}
    for name, other in deployments("prefill-kubernetes.yaml").items():
        if "router" not in name:
            apps.add(other["metadata"]["labels"]["app"])
    assert (chosen["key"], set(chosen["values"])) == ("app", apps)
    (container,) = pod["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]


def test_secrets_are_never_in_the_files():
    """Tokens come from a secret or who runs it, and are optional but for the hosts' own."""
    yaml = pytest.importorskip("yaml")
    for name, servers in SECRETS.items():
        text = (DEPLOY / f"{name}.yaml").read_text()
        assert text.count("name: HF_TOKEN") == servers, name
        kept = re.findall(r"name: (\w+)\n\s+valueFrom:\n\s+secretKeyRef: (.*)", text)
        found = {variable: yaml.safe_load(reference) for variable, reference in kept}
        assert found["HF_TOKEN"] == {"name": "sipipe", "key": "hf-token", "optional": True}
        assert found["VLLM_API_KEY"] == {"name": "sipipe", "key": "api-key", "optional": True}
        assert not re.search(r"name: \w*(TOKEN|KEY|SECRET)\n\s+value:", text)
    for name in COMPOSE:
        for service in services(name).values():
            if "build" in service:
                assert service["environment"] == ["HF_TOKEN", "VLLM_API_KEY"], name


def seconds(service):
    """Those that a compose file's service or a Kubernetes container gives to requests."""
    command = " ".join(
        word for key in ("entrypoint", "command", "args") for word in service.get(key, [])
    )
    found = re.search(r"--shutdown-timeout(?:=| )(\d+)", command)
    # The router: as long as aiohttp's server waits.
    return int(found[1]) if found else 60 * ("router" in command)


def test_requests_in_flight_may_finish_and_no_new_ones_come_meanwhile():
    for name in COMPOSE:
        for service in services(name).values():
            if service["image"].startswith("sipipe"):
                assert int(service["stop_grace_period"][:-1]) > seconds(service) + 8, name
    pods = []
    for name in ("kubernetes.yaml", "prefill-kubernetes.yaml", "leaderworkerset.yaml"):
        for one in documents(name):
            if group := one["spec"].get("leaderWorkerTemplate"):
                pods += [group["leaderTemplate"], group["workerTemplate"]]
            pods += [one["spec"]["template"]] if "template" in one["spec"] else []
    assert len(pods) == 6
    for pod in (each["spec"] for each in pods):
        (container,) = pod["containers"]
        program, sleep = container["lifecycle"]["preStop"]["exec"]["command"]
        grace = pod.get("terminationGracePeriodSeconds", 30)
        assert program == "sleep"
        assert grace > int(sleep) + seconds(container) + 8


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_images_have_the_manifests_user_and_ask_no_proxy_for_their_health(file):
    text = file.read_text()
    user = re.search(r"runAsUser: (\d+)", (DEPLOY / "kubernetes.yaml").read_text())[1]
    assert f"useradd --create-home --uid {user} " in text
    assert re.findall(r"^USER (.+)", text, re.MULTILINE) == [user]
    _, code, check = json.loads(re.search(r"HEALTHCHECK .*\\\n +CMD (.+)", text)[1])

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, proxy = server.server_port, {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        asked = check.replace(":8000/", f":{port}/")
        done = subprocess.run([sys.executable, code, asked], env=os.environ | proxy, check=False)
        server.shutdown()
    assert done.returncode == 0


def test_they_agree():
    cuda = (DEPLOY / "cuda.Dockerfile").read_text()
    assert f"ARG VLLM={SUPPORTED_VLLM[0]}\nFROM vllm/vllm-openai:v${{VLLM}}\n" in cuda
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cuda"] == [f"vllm=={SUPPORTED_VLLM[0]}"]
