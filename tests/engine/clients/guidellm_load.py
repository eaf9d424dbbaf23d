"""GuideLLM's load on servers, for tests/engine/test_clients.py: how its requests ended, as JSON.

Run by the Python of scripts/clients.py with the model's name, its folder and the servers' addresses.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = 12
STREAMS = 4
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 8


def ends(model: str, tokenizer: str, address: str, form: str) -> dict[str, object]:
    """How many requests of a short benchmark ended well, and with how many tokens each.

    Args:
        form: the path that the requests are sent to, such as ``/v1/completions``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        specification = {
            "backend": {
                "kind": "openai_http",
                "target": address,
                "model": model,
                "request_format": form,
                "timeout": 120,
            },
            "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
            "profile": {"kind": "concurrent", "streams": STREAMS},
            "constraints": [{"kind": "max_requests", "count": REQUESTS}],
            "data": [
                {
                    "kind": "synthetic_text",
                    "prompt_tokens": PROMPT_TOKENS,
                    "output_tokens": OUTPUT_TOKENS,
                }
            ],
            "outputs": [{"kind": "json", "path": str(report)}],
        }
        scenario = Path(folder) / "scenario.json"
        scenario.write_text(json.dumps({"metadata": {"name": "short"}, "spec": specification}))
        command = [sys.executable, "-m", "guidellm", "run", "--config", str(scenario)]
        subprocess.run([*command, "--disable-console"], check=True, stdout=sys.stderr)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    return {
        "requests": benchmark["metrics"]["request_totals"],
        "tokens": [request["output_metrics"]["text_tokens"] for request in requests],
    }


if __name__ == "__main__":
    model, path, *addresses = sys.argv[1:]
    forms = ("/v1/completions", "/v1/chat/completions")
    reports = [{form: ends(model, path, address, form) for form in forms} for address in addresses]
    print(json.dumps(reports))
