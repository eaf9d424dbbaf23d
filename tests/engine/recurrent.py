"""A tiny random hybrid model: Falcon-H1's, whose layers have Mamba-2 and attention side by side.

Of vLLM 0.32's hybrid models not all can be cut into stages: Granite 4's loader cannot.
"""

from pathlib import Path


def make(path: Path) -> None:
    """Write the checkpoint."""
    import torch
    from transformers import FalconH1Config, FalconH1ForCausalLM

    from sipipe.tools.make_model.tokenizer import write_tokenizer

    path.mkdir()
    write_tokenizer(path, vocab=1000, max_positions=512)
    config = FalconH1Config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=64,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = FalconH1ForCausalLM(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:  # far enough from nothing that a state makes a difference
            weight.data.normal_(0, 0.2)
    model.save_pretrained(path)
