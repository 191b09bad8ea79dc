"""Real SANA components at toy size: every class is the stock one, only the numbers are small."""

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

WORDS = ["a", "an", "of", "on", "red", "green", "blue", "apple", "whale", "flat", "3d", "emoji", "two"]
TEXT_WIDTH = 16
TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": TEXT_WIDTH,
    "sample_size": 8,
}
# Every part that MHLA can add to a layer.
EVERYTHING = {"mhla_gate": True, "mhla_local_conv": 3, "mhla_norm_out": True, "mhla_per_head_mixing": True}


def stock_transformer(seed: int = 0, **changes) -> SanaTransformer2DModel:
    torch.manual_seed(seed)
    return SanaTransformer2DModel(**(TRANSFORMER | changes)).eval()


def transformer_inputs(
    batch: int = 2, size: tuple[int, int] = (8, 8), seed: int = 0, dtype=torch.float32
) -> dict:
    """Arguments of one forward pass: latents, captions with one padded token, timesteps."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 5)
    mask[:, -1] = 0
    return {
        "hidden_states": torch.randn(batch, 4, *size, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 5, TEXT_WIDTH, generator=draw).to(dtype),
        "timestep": torch.linspace(20.0, 900.0, batch),
        "encoder_attention_mask": mask,
    }


def model(seed: int = 0, **options) -> MHLASanaTransformer2DModel:
    torch.manual_seed(seed)
    return MHLASanaTransformer2DModel(**({"mhla_block_grid": (2, 2)} | TRANSFORMER | options)).eval()


def run(target: torch.nn.Module, **inputs) -> torch.Tensor:
    return target(**(inputs or transformer_inputs())).sample


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]  # Gemma's ids 0, 1, 2 for the first three
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def text_encoder() -> Gemma2Model:
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=4 + len(WORDS),
        hidden_size=TEXT_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return Gemma2Model(config).eval()


def autoencoder() -> AutoencoderDC:
    """Compresses 4 times along each axis: 32 px to 8 latents."""
    torch.manual_seed(2)
    widths = (8, 8, 8)
    return AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
    ).eval()


def components(transformer: SanaTransformer2DModel | None = None) -> dict:
    return {
        "tokenizer": tokenizer(),
        "text_encoder": text_encoder(),
        "vae": autoencoder(),
        "transformer": stock_transformer() if transformer is None else transformer,
        "scheduler": DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
        ),
    }


def stock_pipeline(transformer: SanaTransformer2DModel | None = None) -> SanaPipeline:
    pipe = SanaPipeline(**components(transformer))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
