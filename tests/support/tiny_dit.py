"""Real DiT components at toy size: every class is the stock one, only the numbers are small."""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from mhla_diffusion.models.dit import MHLADiTTransformer2DModel

CLASSES = 10
TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": CLASSES,
}
# Every part that MHLA can add to a layer.
EVERYTHING = {
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
    "mhla_norm_in": True,
    "mhla_per_head_mixing": True,
}
LABELS = {0: "goldfish, Carassius auratus", 1: "white shark", 2: "umbrella"}


def stock_transformer(seed: int = 0, **changes) -> DiTTransformer2DModel:
    torch.manual_seed(seed)
    return DiTTransformer2DModel(**(TRANSFORMER | changes)).eval()


def transformer_inputs(
    batch: int = 2, size: tuple[int, int] = (8, 8), seed: int = 0, dtype=torch.float32
) -> dict:
    """Arguments of one forward pass: latents, timesteps, class labels with the null class as the last."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, *size, generator=draw).to(dtype),
        "timestep": torch.linspace(20, 900, batch).long(),
        "class_labels": torch.tensor([*range(batch - 1), CLASSES]),
    }


def model(seed: int = 0, **options) -> MHLADiTTransformer2DModel:
    torch.manual_seed(seed)
    return MHLADiTTransformer2DModel(**({"mhla_block_grid": (2, 2)} | TRANSFORMER | options)).eval()


def run(target: torch.nn.Module, **inputs) -> torch.Tensor:
    return target(**(inputs or transformer_inputs())).sample


def autoencoder() -> AutoencoderKL:
    """Compresses twice along each axis: 16 px to 8 latents."""
    torch.manual_seed(2)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()


def components(transformer: DiTTransformer2DModel | None = None) -> dict:
    return {
        "transformer": stock_transformer() if transformer is None else transformer,
        "vae": autoencoder(),
        "scheduler": DDIMScheduler(clip_sample=False),
    }


def stock_pipeline(transformer: DiTTransformer2DModel | None = None) -> DiTPipeline:
    pipe = DiTPipeline(**components(transformer))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
