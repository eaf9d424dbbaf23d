"""A tiny random model that sees: BLIP-2's encoder before Llama's layers.

Of vLLM's models with images this one needs no torchvision, which its CPU build does without.
"""

from pathlib import Path

SIDE = 28
"""Pixels of an image's side: four patches."""


def make(path: Path) -> None:
    """Write the checkpoint. vLLM puts an image's tokens before the prompt's."""
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessorPil,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    from sipipe.tools.make_model.tokenizer import write_tokenizer

    path.mkdir()
    write_tokenizer(path, vocab=1000, max_positions=512)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens(["<image>"])
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            **small, num_hidden_layers=2, image_size=SIDE, patch_size=SIDE // 2
        ),
        qformer_config=Blip2QFormerConfig(
            **small, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=1024
        ),
        text_config=LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        ),
        num_query_tokens=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:  # far enough from nothing that an image makes a difference
            weight.data.normal_(0, 0.2)
    model.save_pretrained(path)
    pixels = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(pixels, tokenizer, num_query_tokens=4).save_pretrained(path)
