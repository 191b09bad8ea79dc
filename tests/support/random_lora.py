"""A LoRA as a file, for tests of pipelines that load one."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict


def save_random_lora(pipe: DiffusionPipeline, folder: Path) -> None:
    """Gives the pipeline's transformer a random LoRA and saves that in the pipeline's own way."""
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=draw)
    pipe.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
