"""vLLM's PyTorch sampler in the place of a second runner's: what each request gets of it, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput  # noqa: E402

from sipipe.worker.device import Launched  # noqa: E402
from sipipe.worker.hooks.torch_rows import TorchRows  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402

VOCAB = 50


class Stage:
    """A last stage whose model answers each request with the same logits in each iteration."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", *, fp64: bool = False) -> None:
        scheduler = SimpleNamespace(max_num_seqs=8)
        model_config = SimpleNamespace(
            logprobs_mode=logprobs_mode,
            use_fp64_gumbel=fp64,
            logits_processors=None,
            runner_type="generate",
            get_vocab_size=lambda: VOCAB,
        )
        self.runner = SimpleNamespace(
            max_num_reqs=8,
            max_num_tokens=64,
            max_model_len=64,
            device=torch.device("cpu"),
            model_config=model_config,
            vllm_config=SimpleNamespace(
                scheduler_config=scheduler,
                model_config=model_config,
                speculative_config=None,
                reasoning_config=None,
            ),
            model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        )
        self.logits = torch.from_numpy(
            np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
        )
        self.draws = TorchRows(self.runner, slots=1, reports=True, stall_timeout=1.0)
        self._iteration = 0

    def draw(self, new: dict[str, tuple[list[int], SamplingParams]], names: str):
        """Run an iteration of the requests ``names``, each with its own row of the logits; ``new`` have
        a prompt and parameters. Returns the runner's ``SamplerOutput``."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=([],),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=prompt,
            )
            for name, (prompt, params) in new.items()
        ]
        inputs = ModelInput(iteration=self._iteration, slot=0, buffer_set=0, output=output)
        self._iteration += 1
        self.draws.begin(Launched(inputs=inputs))
        count = len(names)
        batch = SimpleNamespace(
            req_ids=list(names),
            num_reqs=count,
            num_computed_tokens_np=np.ones(count, np.int32),
            num_scheduled_tokens=np.ones(count, np.int32),
            prefill_len_np=np.ones(count, np.int32),
            logits_indices=torch.arange(count),
        )
        drawn, sampled, _ = self.runner.sample(self.logits[:count], batch, None)
        assert sampled.tolist() == [1] * count
        return drawn


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("named", [[7], [7, 3, 9, 40, 2, 11]])
def test_a_request_that_names_tokens_leaves_the_others_their_logprobs(mode, named):
    """They are those of a batch of its own."""
    asked = {
        "a": SamplingParams(temperature=0, logprobs=3),
        "b": SamplingParams(temperature=0, logprob_token_ids=named),
        "c": SamplingParams(temperature=0),
        "d": SamplingParams(temperature=0, logprobs=0),
    }
    new = {name: ([1, 2], params) for name, params in asked.items()}
    together = Stage(mode).draw(new, "abcd").logprobs_tensors
    for row, (name, params) in enumerate(asked.items()):
        if params.num_logprobs is None:
            continue
        stage = Stage(mode)
        stage.logits = stage.logits[row:]
        alone = stage.draw({name: new[name]}, name).logprobs_tensors
        width = 1 + params.num_logprobs
        for of_all, own in zip(together[:2], alone[:2], strict=True):
            assert own.shape == (1, width)
            assert torch.equal(of_all[row, :width], own[0])
        assert together.selected_token_ranks[row] == alone.selected_token_ranks[0]


def tokens(stage: Stage, prompt: list[int], seed: int) -> list[int]:
    """Twelve tokens of a request, all of the vocabulary as likely."""
    stage.logits = torch.zeros(8, VOCAB)
    first = stage.draw({"a": (prompt, SamplingParams(seed=seed))}, "a")
    more = [stage.draw({}, "a") for _ in range(11)]
    return [int(drawn.sampled_token_ids) for drawn in (first, *more)]


def test_noise_of_64_bits_is_drawn_where_it_is_asked_for():
    """By ``--use-fp64-gumbel``: vLLM draws other numbers from the same seed then."""
    assert tokens(Stage(fp64=True), [1], 5) != tokens(Stage(), [1], 5)


def test_a_turn_of_a_session_has_its_own_seed():
    """And a request that was preempted draws on with the numbers that follow."""
    stage = Stage()
    assert tokens(stage, [1], 5) == tokens(Stage(), [1], 5)
    resumed = tokens(stage, [1], 5)
    assert resumed != tokens(Stage(), [1], 5)
    assert tokens(stage, [1, 2], 6) == tokens(Stage(), [1, 2], 6)


def test_an_end_that_the_model_has_not_is_not_masked():
    """A tokenizer may have it. vLLM looks for its logit, and ends with an IndexError."""
    params = SamplingParams(temperature=0, min_tokens=1)
    params.update_from_generation_config({"eos_token_id": [VOCAB, VOCAB + 7]}, VOCAB + 9)
    stage = Stage()
    drawn = stage.draw({"a": ([1], params)}, "a")
    assert int(drawn.sampled_token_ids) == int(stage.logits[0].argmax())
    assert params.all_stop_token_ids == {VOCAB, VOCAB + 7, VOCAB + 9}
