"""Rows of a trained model's own logits, kept as `benchmarks/data/smollm2.npz`.

    sipipe make-model smollm2 DIR
    python -m benchmarks.smollm2_logits DIR

32 positions of chats and code, 49,152 logits each, as bits of bfloat16. Half of them end a prompt,
where the model has many ways on; the others lie within the text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

KEPT = Path(__file__).parent / "data" / "smollm2.npz"
CHATS = (
    "Write a short story about a lighthouse.",
    "What is the capital of France? Answer in one word.",
    "Give me three random first names.",
    "Explain to a child why the sky is blue.",
    "Translate 'good morning, how are you?' into Spanish.",
    "Invent a recipe with potatoes, apples and thyme.",
    "List the prime numbers below thirty.",
    "Tell me a joke about computers.",
)
CODE = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return ",
    "import numpy as np\n\n\ndef softmax(x):\n    e = np.exp(x - x.max())\n    return e /",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2024 GROUP BY name ORDER BY",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self,",
    "<html>\n<head><title>Home</title></head>\n<body>\n<h1>Welcome</h1>\n<p>",
    "fn main() {\n    let mut total = 0;\n    for i in 1..=100 {\n        total +=",
    "git commit -m '",
)


def smollm2() -> np.ndarray[Any, Any]:
    """The kept rows: uint16 [32, 49,152]."""
    rows: np.ndarray[Any, Any] = np.load(KEPT)["logits"]
    return rows


def main(model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in CHATS
    ]
    rows = []
    for text in (*chats, *CODE):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = network(ids).logits[0]
        rows += [logits[-1], logits[len(logits) // 2]]
    bits = torch.stack(rows).to(torch.bfloat16).view(torch.uint16).numpy()
    KEPT.parent.mkdir(exist_ok=True)
    np.savez_compressed(KEPT, logits=bits)


if __name__ == "__main__":
    main(sys.argv[1])
