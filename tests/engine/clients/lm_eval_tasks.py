"""Local tasks of lm_eval, for tests/engine/test_clients.py: scores and samples of servers, as JSON.

Run by the Python of scripts/clients.py with the model's name, its folder and the servers' addresses.
"""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

DOCUMENTS = (
    {"question": "A pipeline has", "choices": ["stages", "wings", "a tail"], "answer": 0},
    {"question": "A request has", "choices": ["a beak", "tokens"], "answer": 1},
    {"question": "The last stage draws", "choices": ["a horse", "a token"], "answer": 1},
    {"question": "Once upon a time", "choices": [" there was", " there were"], "answer": 0},
)
DATA = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = (
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    {
        "task": "texts",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
    {
        "task": "perplexities",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}} {{choices[answer]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
)
"""What lm_eval asks a server for: log-probabilities of a prompt's end, texts, those of a whole text."""


def write_tasks(folder: Path) -> None:
    """Write the documents, and a file for each task; JSON is YAML too."""
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    source = {"dataset_kwargs": {"data_files": {"test": str(documents)}}}
    for task in TASKS:
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**DATA, **source, **task}))


def answers(model: str, tokenizer: str, address: str, tasks: TaskManager) -> dict[str, object]:
    """Each task's scores, and each sample's answers, of the server at ``address``."""
    outcome = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{address}/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": 255,
            "max_retries": 1,
            "timeout": 120,
        },
        tasks=[task["task"] for task in TASKS],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    samples = {
        name: [sample["filtered_resps"] for sample in task]
        for name, task in outcome["samples"].items()
    }
    return {"scores": outcome["results"], "samples": samples}


if __name__ == "__main__":
    model, path, *addresses = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        print(json.dumps([answers(model, path, address, tasks) for address in addresses]))
