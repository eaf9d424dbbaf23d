"""Every instruction of deploy/*.Dockerfile, RUN lines above all, without a builder of containers.

The base image is this machine's system, below an overlay that takes what is written and is thrown
away; the CUDA one has this environment's packages in the place of its vLLM. What is copied is a clean
tree. Not shown: that the base images have what this system has. Needs root, and a package index.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from tests.programs import ran

ROOT = Path(__file__).parents[1]
DOCKERFILES = ROOT / "deploy"
PYTHON = (Path(sys.base_prefix) / "bin" / "python3").absolute()
"""In the place of a base image's."""
BASE = "/opt/base"
"""A Python with this environment's packages, where the image is built on one that has vLLM."""
LENT = sysconfig.get_paths()["purelib"]
LIBRARY = "python{}.{}".format(*sys.version_info)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def reachable(value: str) -> bool:
    try:
        with urllib.request.urlopen(value, timeout=10):
            return True
    except OSError:
        return False


def script(file: Path, context: str) -> str:
    """What a builder does, as lines of bash inside the overlay that is mounted at ``$root``."""
    passed = ("PIP_", "SSL_", "http", "HTTP", "no_proxy", "NO_PROXY")
    variables = {k: v for k, v in os.environ.items() if k.startswith(passed)}
    variables["PATH"] = (
        f"{PYTHON.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    user, place, lines = "0", "/", []

    def inside(command: str) -> str:
        home = f"HOME=$(getent passwd {user} | cut -d: -f6)"
        told = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        run = shlex.quote(f"{home}; export HOME; cd {place} && {{ {command}\n}}")
        return f'chroot --userspec={user} "$root" env -i {told} sh -c {run}'

    for name, rest in instructions(file):
        match name:
            case "FROM" if "vllm" in rest:
                lines.append(inside(f"python3 -m venv {BASE}"))
                lines.append(inside(f"echo {LENT} > {BASE}/lib/{LIBRARY}/site-packages/lent.pth"))
                variables["PATH"] = f"{BASE}/bin:{variables['PATH']}"
            case "ARG":
                key, _, value = rest.partition("=")
                if "://" not in value or reachable(value):  # else pip's own configuration holds
                    variables.setdefault(key, value)
            case "ENV":
                for word in shlex.split(rest):
                    key, _, value = word.partition("=")
                    variables[key] = value.replace("$PATH", variables["PATH"])
            case "USER":
                user = rest
            case "WORKDIR":
                place = rest
                lines.append(inside("true").replace(f"cd {place}", f"mkdir -p {place}"))
            case "COPY":
                *given, target = [word for word in rest.split() if not word.startswith("--")]
                for source in given:
                    end = "" if (Path(context) / source).is_file() else "/."
                    inner = f"$root{place}/{target}"
                    lines.append(
                        f'mkdir -p "{inner if target.endswith("/") or end else f"$root{place}"}"'
                    )
                    lines.append(f'cp -r {context}/{source}{end} "{inner}"')
                    if "--chown" in rest:
                        lines.append(f'chown -R {user} "{inner}"')
            case "RUN":
                lines += [f"echo {shlex.quote(f'RUN {rest}')}", inside(rest)]
            case "ENTRYPOINT":
                words = re.findall(r'"([^"]+)"', rest)
                lines.append(inside(f"{shlex.join(words)} --help"))
    checks = (
        'python3 -c "import sipipe; print(sipipe.__file__)"; ls -1 $(dirname $(command -v sipipe))'
    )
    return "\n".join([*lines, "echo BUILT", inside(checks)])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_instruction_works_in_a_clean_tree(name, tmp_path):
    if os.geteuid() or not shutil.which("apt-get") or not (ROOT / ".git").exists():
        pytest.skip("needs root on a Debian, and git's list of files")
    context, overlay = tmp_path / "context", tmp_path / "overlay"
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for file in (name for name in tracked if (ROOT / name).is_file()):
        (context / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, context / file)
    for part in ("upper", "work", "root"):
        (overlay / part).mkdir(parents=True)
    dirs = f"lowerdir=/,upperdir={overlay}/upper,workdir={overlay}/work"
    mount = f"mount -t overlay overlay -o {dirs} {overlay}/root"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("this system mounts no overlay")
    # Everybody may run the Python that this one is of; it may lie in root's directory.
    ways = " ".join(f'"$root{parent}"' for parent in PYTHON.parents)
    ready = [f"set -e; {mount}; root={overlay}/root", f"chmod o+x {ways}"]
    ready += [f'mount --rbind /{each} "$root/{each}"' for each in ("proc", "dev", "sys")]
    # No base image has a user of the number that the CPU one makes.
    ready += ['chroot "$root" sh -c "getent passwd 1000 | cut -d: -f1 | xargs -r userdel"']
    lines = script(DOCKERFILES / f"{name}.Dockerfile", str(context))
    done = ran(["unshare", "-m", "bash"], input="\n".join([*ready, lines]))
    shutil.rmtree(overlay, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-6000:]
    said, (where, *programs) = done.stdout, done.stdout.split("BUILT\n")[1].splitlines()
    lines_run = [line for line in said.splitlines() if line.startswith("RUN ")]
    told = instructions(DOCKERFILES / f"{name}.Dockerfile")
    assert lines_run == [f"RUN {rest}" for what, rest in told if what == "RUN"]
    assert where.startswith({"cpu": "/opt/sipipe/src", "cuda": BASE}[name])
    assert "sipipe" in programs
    assert not {"pytest", "mypy", "ruff", "viztracer"} & {*programs}, "a tool of developers"
