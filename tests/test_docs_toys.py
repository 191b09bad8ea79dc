"""Code in the documentation that needs a published checkpoint runs on a toy one of the same kind in its place."""

import re
from pathlib import Path

import original_layouts
import pytest
import tiny_dit
import tiny_sana
import tiny_sana_video_pipeline
import tiny_wan
import tiny_wan_pipeline
import torch
from diffusers import WanPipeline
from peft import LoraConfig

from mhla_diffusion import MHLASanaPipeline, MHLAWanPipeline, convert
from mhla_diffusion.models.adapters import save_adapter

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r'"((?:path/to|runs)/[^"]+)"')
SMALLER = {
    "pipe.enable_model_cpu_offload()\n": "",
    "height=480, width=832": "height=32, width=48, num_frames=5",
}


def stock_dit():
    return tiny_dit.stock_pipeline(tiny_dit.stock_transformer(num_layers=28, num_embeds_ada_norm=1000))


def sana_mhla(**options):
    pipe = tiny_sana.stock_pipeline(convert(tiny_sana.stock_transformer(), **options))
    return MHLASanaPipeline.from_pipe(pipe)


def trained():
    pipe = sana_mhla(block_grid=(4, 4))
    pipe.transformer.requires_grad_(False).add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    pipe.transformer.transformer_blocks[0].attn1.mixing.requires_grad_(True)
    return pipe


KINDS = {
    "path/to/sana": tiny_sana.stock_pipeline,
    "path/to/sana-mhla": lambda: sana_mhla(block_grid=(4, 4)),
    "path/to/DiT-XL-2-512": stock_dit,
    "path/to/wan-mhla": lambda: MHLAWanPipeline(**tiny_wan_pipeline.components(tiny_wan.model())),
    "path/to/Wan2.1-T2V-1.3B-Diffusers": lambda: WanPipeline(
        **tiny_wan_pipeline.components(tiny_wan.stock_transformer())
    ),
    "path/to/SANA-Video_2B_480p_diffusers": tiny_sana_video_pipeline.stock_pipeline,
}


def original_dit(place: str) -> None:
    """A file of the original code, of a width that tells the number of heads."""
    wide = original_layouts.stock_dit(num_attention_heads=6, attention_head_dim=64, num_layers=1)
    Path(place).parent.mkdir(parents=True)
    torch.save(original_layouts.dit_state(wide), place)


def blocks() -> list:
    """All but those for several processes, which torchrun starts."""
    found = []
    for page in sorted({ROOT / "README.md", *ROOT.glob("docs/*.md")}):
        code = re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        found += [
            pytest.param(block, id=page.name)
            for block in code
            if "path/to" in block and "LOCAL_RANK" not in block
        ]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", blocks())
def test_a_block_about_a_checkpoint_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = PLACE.findall(block)
    assert places
    for place in places:
        if place in KINDS:
            KINDS[place]().save_pretrained(place)
        elif place.endswith(".pt"):
            original_dit(place)
        elif place.startswith("runs/"):
            save_adapter(trained(), place)
    for published, toy in SMALLER.items():
        block = block.replace(published, toy)
    exec(compile(block, "block", "exec"), {"pipe": trained()})
    assert all(Path(place).exists() for place in places) and torch.is_grad_enabled()
