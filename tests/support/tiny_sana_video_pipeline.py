"""Real components of SANA-Video pipelines at toy size: every class is the stock one, only the numbers are small."""

import tiny_sana
import torch
from diffusers import DPMSolverMultistepScheduler, SanaVideoPipeline
from model_checks import stirred
from tiny_sana_video import model, stock_transformer
from tiny_wan_pipeline import autoencoder


def components(transformer: torch.nn.Module | None = None) -> dict:
    """Wan's autoencoder: 9 x 64 x 96 pixels to 3 x 8 x 12 latents."""
    return {
        "tokenizer": tiny_sana.tokenizer(),
        "text_encoder": tiny_sana.text_encoder(),
        "vae": autoencoder(),
        "transformer": stirred(model()) if transformer is None else transformer,
        "scheduler": DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0
        ),
    }


def stock_pipeline(transformer: torch.nn.Module | None = None) -> SanaVideoPipeline:
    pipe = SanaVideoPipeline(
        **components(stirred(stock_transformer()) if transformer is None else transformer)
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
