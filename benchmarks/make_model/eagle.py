"""An EAGLE draft head of a llama model, trained on text that the model itself writes.

    sipipe make-model smollm2 build/models/SmolLM2-135M-Instruct
    python -m benchmarks.make_model.eagle build/models/SmolLM2-135M-Instruct build/models/SmolLM2-135M-Instruct-eagle

The head is one layer of the model's own kind. At each position it reads the model's hidden state, as the
last norm leaves it, and the embedding of the next token; it gives the hidden state of the next position,
of which the model's output projection makes a draft. That is the format of published EAGLE heads
(https://arxiv.org/abs/2401.15077), which vLLM takes: ``{"method": "eagle", "model": DIRECTORY}``.

The texts are answers to questions such as those of :mod:`benchmarks.speculation`'s kind "chat", half of
them greedy, half drawn as a chat's are. Questions have numbers, and the benchmark asks others: so the
head is measured on texts of the kind that it knows, and on none that it has seen. Amounts and seeds are
fixed. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.speculation import SAMPLING, asked
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.smollm2 import place

FIRST_QUESTION = 1000
"""Number of the first question; the benchmark asks those below."""
HELD_OUT = 16
"""Texts that the head is not trained on, and tried on in the end."""
TOGETHER = 64
"""Texts that are written at once."""
BATCH = 8
"""Texts of a step of training."""
LEARNING_RATE = 1e-3
OWN = 0.5
"""Part of the hidden states that are the head's own, after half of the training: behind the first draft
it reads what it has made itself."""
REGRESSION = 1.0
"""Weight of the distance to the model's hidden states, beside the cross entropy of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What the model has written behind a question."""

    tokens: torch.Tensor
    """[n] int64, the question's too."""
    hidden: torch.Tensor
    """[n - 1, H] float32, of all but the last token, as the model's last norm leaves them."""
    question: int
    """Tokens of the question."""


class Head(torch.nn.Module):
    """The layer, by the names of its weights in a checkpoint.

    Args:
        config: transformers' configuration of the model.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        hidden = config.hidden_size
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = torch.nn.Identity()  # EAGLE's first layer has none
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = torch.nn.ModuleList([layer])
        self._rotary = LlamaRotaryEmbedding(config)  # it has no weights
        for matrix in self.parameters():
            if matrix.dim() > 1:
                torch.nn.init.normal_(matrix, std=0.02)
        # It begins with the hidden state that it reads, so that its size is right.
        with torch.no_grad():
            self.fc.weight[:, hidden:] += torch.eye(hidden)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, H] of the next positions.

        Args:
            embedded: [B, T, H] input embeddings of the next tokens.
            hidden: [B, T, H] hidden states.
        """
        mixed = self.fc(torch.cat((embedded, hidden), dim=-1))
        positions = torch.arange(mixed.shape[1])[None]
        output: torch.Tensor = self.layers[0](
            mixed, position_embeddings=self._rotary(mixed, positions)
        )
        return output


def make_head(model_path: Path, directory: Path, *, texts: int, tokens: int, rounds: int) -> float:
    """Train a head of the model in ``model_path``, and write its checkpoint to ``directory``.

    Args:
        texts: texts that the model writes, besides those to try the head on.
        tokens: new tokens of each at most.
        rounds: times that the head sees each text.

    Returns the part of the held-out texts' tokens that the head's first draft is.

    Raises:
        ConfigError: ``directory`` holds something, or the model is no llama.
        ResourceError: it cannot be written.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((model_path / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ConfigError(f"make-model: {model_path} is a {config['model_type']}, not a llama")
    if directory.exists() and any(directory.iterdir()):  # said before minutes have gone by
        raise ConfigError(f"make-model: {directory} is there already; name a new directory")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.requires_grad_(False)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    written = list(write(model, tokenizer, HELD_OUT + texts, tokens))
    head = Head(model.config)
    train(head, model, written[HELD_OUT:], rounds)
    right = first_drafts_right(head, model, written[:HELD_OUT])
    weights = {
        name: weight.to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()
    }
    size = sum(weight.nbytes for weight in weights.values())
    place(directory, size, lambda scratch: save(scratch, config, weights))
    return right


def write(model: Any, tokenizer: Any, texts: int, tokens: int) -> Iterator[Text]:
    """Have the model answer ``texts`` questions, with ``tokens`` new tokens each at most."""
    for first in range(0, texts, TOGETHER):
        numbers = range(FIRST_QUESTION + first, FIRST_QUESTION + min(texts, first + TOGETHER))
        said = [[{"role": "user", "content": asked("chat", number)}] for number in numbers]
        questions = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        drawn = first // TOGETHER % 2 == 1
        seen: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_hook(lambda *call: seen.append(call[2]))  # noqa: B023
        output = model.generate(
            **questions,
            max_new_tokens=tokens,
            do_sample=drawn,
            pad_token_id=tokenizer.pad_token_id,
            **(SAMPLING["chat"] | {"top_k": 0} if drawn else {}),
        )
        hook.remove()
        hidden = torch.cat(seen, dim=1)
        longest = questions["input_ids"].shape[1]
        for row, padded in enumerate(output):
            begin = longest - int(questions["attention_mask"][row].sum())
            ends = (padded[longest:] == tokenizer.eos_token_id).nonzero()
            end = longest + (int(ends[0]) + 1 if len(ends) else tokens)
            yield Text(
                tokens=padded[begin:end].clone(),
                hidden=hidden[row, begin : end - 1].clone(),
                question=longest - begin,
            )
        print(f"{min(texts, first + TOGETHER)} of {texts} texts", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B texts of at most T + 2 tokens, the shorter ones with something behind them. Nobody looks there,
    as attention is causal."""

    embedded: torch.Tensor
    """[B, T, H] of each position's next token."""
    hidden: torch.Tensor
    """[B, T, H] of each position."""
    following: torch.Tensor
    """[B, T, H] of the position behind: what the head is to give."""
    drafts: torch.Tensor
    """[B, T] int64 tokens behind the next ones: what the model wrote where a draft stands."""
    counts: torch.Tensor
    """[B, T] bool: the draft is of the answer."""


def batch_of(texts: Sequence[Text], embedding: torch.Tensor) -> Batch:
    """The positions of ``texts`` that have two tokens behind them; ``embedding`` is [V, H]."""

    def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    return Batch(
        embedded=functional.embedding(padded([text.tokens[1:-1] for text in texts]), embedding),
        hidden=padded([text.hidden[:-1] for text in texts]),
        following=padded([text.hidden[1:] for text in texts]),
        drafts=padded([text.tokens[2:] for text in texts]),
        counts=padded([torch.arange(2, len(text.tokens)) >= text.question for text in texts]),
    )


def train(head: Head, model: Any, texts: Sequence[Text], rounds: int) -> None:
    """Train the head until its drafts are as likely as it can make them, ``rounds`` times each text."""
    embedding = model.get_input_embeddings().weight
    # Only tokens that come: the whole projection would be most of the work.
    words = torch.cat([text.tokens for text in texts]).unique()
    projection = model.get_output_embeddings().weight[words]
    size = torch.cat([text.hidden for text in texts[:BATCH]]).std()
    steps = rounds * (len(texts) // BATCH)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05
    )
    order: list[int] = []
    for step in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(texts)).tolist()
        batch = batch_of([texts[order.pop()] for _ in range(BATCH)], embedding)
        hidden = batch.hidden
        if step > steps // 2:
            hidden = _with_own(head, batch)
        made = head(batch.embedded, hidden)[batch.counts]
        wanted = batch.following[batch.counts]
        likely = functional.softmax(wanted @ projection.T, dim=-1)
        loss = functional.cross_entropy(made @ projection.T, likely)
        loss = loss + REGRESSION * functional.smooth_l1_loss(made / size, wanted / size)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: {loss.item():.3f}", file=sys.stderr, flush=True)


def _with_own(head: Head, batch: Batch) -> torch.Tensor:
    """The batch's hidden states [B, T, H], some of them as the head makes them."""
    with torch.no_grad():
        made = head(batch.embedded, batch.hidden)
    own = torch.cat((batch.hidden[:, :1], made[:, :-1]), dim=1)
    chosen = torch.rand(own.shape[:2]) < OWN
    return torch.where(chosen[..., None], own, batch.hidden)


@torch.no_grad()
def first_drafts_right(head: Head, model: Any, texts: Sequence[Text]) -> float:
    """The part of the answers' tokens, from the second on, that the head's first draft is."""
    batch = batch_of(texts, model.get_input_embeddings().weight)
    made = head(batch.embedded, batch.hidden)[batch.counts]
    drafts = model.get_output_embeddings()(made).argmax(dim=-1)
    return float((drafts == batch.drafts[batch.counts]).float().mean())


def save(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write a head's checkpoint; ``config`` is the model's."""
    from safetensors.torch import save_file

    config = config | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Make a head, and print how often its first draft is right."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_model.eagle", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--texts", type=int, default=512, help="default: 512")
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each (default: 128)")
    parser.add_argument("--rounds", type=int, default=12, help="of training (default: 12)")
    args = parser.parse_args()
    right = make_head(
        args.model, args.directory, texts=args.texts, tokens=args.tokens, rounds=args.rounds
    )
    print(f"{args.directory}: the first draft is right for {right:.2f} of held-out tokens")


if __name__ == "__main__":
    try:
        main()
    except SiPipeError as error:
        sys.exit(str(error))
