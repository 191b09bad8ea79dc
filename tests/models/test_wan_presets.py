"""The published Wan models: their sizes, their shapes in the original layout, and MHLA of the paper's shape in them."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from original_keys import to_original

from mhla_diffusion.models.checkpoint_layouts import find_layout
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.models.wan_layouts import WAN
from mhla_diffusion.models.wan_presets import WAN_MODELS, wan_config

# Billions of parameters as the published files hold them.
PUBLISHED = {
    "2.1-t2v-1.3B": 1.42,
    "2.1-t2v-14B": 14.29,
    "2.1-i2v-14B": 16.39,
    "2.1-flf2v-14B": 16.40,
    "2.2-t2v-A14B": 14.29,
    "2.2-i2v-A14B": 14.29,
    "2.2-ti2v-5B": 5.00,
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", WAN_MODELS)
def test_the_sizes_are_the_published_ones(name):
    config = wan_config(name)
    with torch.device("meta"):
        stock = WanTransformer3DModel(**config)
        hybrid = MHLAWanTransformer3DModel(**config, mhla_layers="2/3")
        gated = MHLAWanTransformer3DModel(**config, mhla_gate=True, mhla_local_conv=3)
    assert round(count(stock) / 1e9, 2) == PUBLISHED[name]
    layers, width = config["num_layers"], 128 * config["num_attention_heads"]
    kept = len(range(0, layers, 3))
    assert count(hybrid) - count(stock) == (layers - kept) * (150 * 150 + 128)
    assert hybrid.config.mhla_layers == [i for i in range(layers) if i % 3]
    extra = (
        150 * 150 + 128 + width * width + width + 28 * width
    )  # matrix, norm, gate, convolution and its bias
    assert count(gated) - count(stock) == layers * extra


@pytest.mark.parametrize("name", WAN_MODELS)
def test_the_published_models_are_read_off_their_shapes(name):
    config = wan_config(name)
    with torch.device("meta"):
        state = MHLAWanTransformer3DModel(**config, mhla_layers=[]).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in to_original(state, WAN).items()}
    found = find_layout(shapes)
    assert found is WAN
    assert found.read_config(shapes, {}.__getitem__, {}) == config | {"patch_size": [1, 2, 2]}


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"choose one of 2\.1-t2v-1\.3B, .*2\.2-ti2v-5B"):
        wan_config("1.3B")
