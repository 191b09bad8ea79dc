"""A LoRA as a file, for tests of pipelines that load one."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from mhla_diffusion.models.adapters import save_adapter


def save_random_lora(pipe: DiffusionPipeline, folder: Path) -> None:
    """Gives the pipeline's transformer a random LoRA and saves that in the pipeline's own way."""
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=draw)
    pipe.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))


def save_lora_of(
    made: torch.nn.Module,
    folder: Path,
    kind: type[DiffusionPipeline],
    *,
    seed: int = 0,
    rank: int = 2,
    targets: tuple[str, ...] = ("to_q", "to_v"),
    mixing: bool = False,
) -> str:
    """Gives a transformer a random LoRA and saves it as a pipeline does, or with `mixing` moved mixings beside it."""
    made.requires_grad_(False)
    made.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)))
    for name, parameter in made.named_parameters():
        draw = torch.Generator().manual_seed(seed)
        if "lora_" in name:
            parameter.data.normal_(generator=draw)
        elif mixing and "mixing" in name:
            parameter.requires_grad_(True).data += 0.2 * torch.rand(parameter.shape, generator=draw)
    if mixing:
        save_adapter(made, folder)
    else:
        kind.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(made))
    return str(folder)
