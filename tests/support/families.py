"""The model families with their toy sizes, for tests that ask the same of each."""

from types import ModuleType
from typing import NamedTuple

import pytest
import tiny_dit
import tiny_sana
import tiny_sana_video
import tiny_wan
import torch
from diffusers import (
    DiTTransformer2DModel,
    SanaTransformer2DModel,
    SanaVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import AttnProcessor2_0, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from model_checks import gradients

from mhla_diffusion.attention import (
    MHLAAttnProcessor,
    MHLADiTAttention,
    MHLASanaAttention,
    SoftmaxDiTAttention,
    SoftmaxSanaAttention,
)
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.sana_video_attention import (
    MHLASanaVideoAttention,
    MHLASanaVideoAttnProcessor,
    SoftmaxSanaVideoAttention,
)
from mhla_diffusion.wan_attention import MHLAWanAttention, MHLAWanAttnProcessor, SoftmaxWanAttention


class Family(NamedTuple):
    """A model class with its toy sizes; `full` has every option, in a layer 1 that the tests look at."""

    tiny: ModuleType
    stock: type
    ours: type
    attention: type
    softmax: type  # ours, for the layers beside MHLA
    processor: type
    foreign: type
    full: dict
    norms: tuple[str, ...]  # weights that EVERYTHING brings, beside mixing, gate and convolution
    sizes: tuple[tuple[int, ...], ...]  # of latents, each other than the default and than each other
    default_grid: tuple[int, ...]  # of blocks
    attentions: tuple[str, ...] = ("attn1", "attn2")  # of a layer, that a LoRA finds

    @property
    def layers(self) -> str:
        return self.ours._layers_in

    @property
    def is_video(self) -> bool:
        return len(self.default_grid) == 3

    def model(self, **options) -> torch.nn.Module:
        return self.tiny.model(**options)

    def stock_model(self, **changes) -> torch.nn.Module:
        return self.tiny.stock_transformer(**changes)

    def layer(self, model: torch.nn.Module, index: int) -> torch.nn.Module:
        return getattr(model, self.layers)[index]

    def inputs(self, **options) -> dict[str, torch.Tensor]:
        return self.tiny.transformer_inputs(**options)

    def run(self, model: torch.nn.Module, **inputs) -> torch.Tensor:
        return self.tiny.run(model, **inputs)

    def gradients(self, model: torch.nn.Module, **inputs) -> dict[str, torch.Tensor]:
        return gradients(model, **(inputs or self.inputs()))

    def on_gpu(self, **options) -> dict[str, torch.Tensor]:
        return {name: x.to("cuda") for name, x in self.inputs(**options).items()}


DIT = Family(
    tiny_dit,
    DiTTransformer2DModel,
    MHLADiTTransformer2DModel,
    MHLADiTAttention,
    SoftmaxDiTAttention,
    MHLAAttnProcessor,
    AttnProcessor2_0,
    tiny_dit.EVERYTHING,
    norms=("norm_out.weight", "norm_in.weight", "norm_in.bias"),
    sizes=((8, 12), (12, 6)),
    default_grid=(4, 4),
    attentions=("attn1",),
)
SANA = Family(
    tiny_sana,
    SanaTransformer2DModel,
    MHLASanaTransformer2DModel,
    MHLASanaAttention,
    SoftmaxSanaAttention,
    MHLAAttnProcessor,
    SanaLinearAttnProcessor2_0,
    {"mhla_layers": [1], **tiny_sana.EVERYTHING},
    norms=("norm_out.weight",),
    sizes=((7, 5), (12, 6)),
    default_grid=(4, 4),
)
WAN = Family(
    tiny_wan,
    WanTransformer3DModel,
    MHLAWanTransformer3DModel,
    MHLAWanAttention,
    SoftmaxWanAttention,
    MHLAWanAttnProcessor,
    WanAttnProcessor,
    {"mhla_layers": [1], **tiny_wan.EVERYTHING},
    norms=("norm_out.weight", "norm_projected.weight"),
    sizes=((2, 12, 6), (3, 12, 14)),
    default_grid=(3, 5, 10),
)
SANA_VIDEO = Family(
    tiny_sana_video,
    SanaVideoTransformer3DModel,
    MHLASanaVideoTransformer3DModel,
    MHLASanaVideoAttention,
    SoftmaxSanaVideoAttention,
    MHLASanaVideoAttnProcessor,
    SanaLinearAttnProcessor3_0,
    {"mhla_layers": [1], **tiny_sana_video.EVERYTHING},
    norms=("norm_out.weight",),
    sizes=((2, 12, 6), (3, 12, 14)),
    default_grid=(3, 5, 10),
)
EACH = pytest.mark.parametrize(
    "family", [DIT, SANA, WAN, SANA_VIDEO], ids=["DiT", "SANA", "Wan", "SANA-Video"]
)
VIDEO = pytest.mark.parametrize("family", [WAN, SANA_VIDEO], ids=["Wan", "SANA-Video"])
SOFTMAX_BESIDE = {"mhla_layers": [0], "mhla_other_layers": "softmax"}
