"""What the pages show works when it is copied: Python as files, commands by their options."""

import ast
import dataclasses
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from sipipe.cli import COMMANDS, main
from tests.programs import ran

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def test_every_python_snippet_is_python():
    snippets = [text for page in PAGES for text in blocks(page, "python")]
    assert len(snippets) >= 4
    for text in snippets:
        ast.parse(text)


def run(code: str, folder: Path, **environment: str) -> None:
    file = folder / "snippet.py"
    file.write_text(code)
    command = [sys.executable, str(file)]
    done = ran(command, cwd=folder, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_library_s_snippets_run_one_after_the_other(tmp_path):
    run("\n".join(blocks(ROOT / "docs" / "library.md", "python")), tmp_path)


@pytest.mark.engine
@pytest.mark.slow
def test_readme_s_snippet_runs_as_a_file(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from benchmarks.make_model.checkpoint import make_model

    (code,) = blocks(ROOT / "README.md", "python")
    model = make_model("llama", tmp_path / "model")
    assert '"MODEL"' in code
    asked = "    print(llm.generate(['Once'])[0].outputs[0].text)\n"
    code = code.replace('"MODEL"', repr(str(model))) + asked
    run(code, tmp_path, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def commands() -> list[list[str]]:
    """The words of every ``sipipe`` and ``vllm serve`` in a block of a page."""
    found = []
    for page in PAGES:
        for text in [*blocks(page, ""), *blocks(page, "sh")]:
            for line in text.replace("\\\n", " ").splitlines():
                line = re.sub(r"^(\$ |[A-Z_]+=\S+ )+", "", line.strip())
                name = line.partition(" ")[0]
                if name == "sipipe" or line.startswith("vllm serve "):
                    words = shlex.split(line, comments=True)
                    if len(words) > 1 and (words[1] in COMMANDS or name == "vllm"):
                        found.append(words)
    return found


def test_commands_of_the_pages_have_options_that_there_are(capsys):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm import AsyncEngineArgs

    theirs = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(AsyncEngineArgs)}
    theirs |= {f"--no{option[1:]}" for option in theirs}
    theirs |= {"-pp", "-tp", "--host", "--port", "--shutdown-timeout", "--middleware"}
    wrong, known = [], {}
    for program, command, *words in commands():
        if program == "sipipe" and command not in known:
            assert main([command, *(["report"] * (command == "trace")), "--help"]) == 0
            known[command] = set(
                re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", capsys.readouterr().out)
            )
        asked = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        allowed = known[command] | {"--perfetto"} if program == "sipipe" else set()
        wrong += [(program, command, option) for option in asked - allowed - theirs]
    assert len(commands()) > 25
    assert not wrong
