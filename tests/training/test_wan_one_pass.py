"""The autoencoder over all frames at once is the stock one that goes frame by frame: values and gradients."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from mhla_diffusion.training.autoencoder import AutoencoderRecipe
from mhla_diffusion.training.recipe import read_table
from mhla_diffusion.training.video_autoencoder import build, clip_loss
from mhla_diffusion.training.wan_one_pass import latents_of, pixels_of

SHAPES = {
    "shipped": {"is_residual": True, "dim_mult": [1, 2, 2], "temperal_downsample": [True, True]},
    "Wan 2.1": {"dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True], "num_res_blocks": 2},
    "Wan 2.2": {
        "is_residual": True,
        "dim_mult": [1, 2, 2, 2],
        "temperal_downsample": [False, True, True],
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
    },
}


def toy(**options):
    torch.manual_seed(0)
    small = {"base_dim": 4, "decoder_base_dim": 8, "z_dim": 3, "num_res_blocks": 1}
    vae = AutoencoderKLWan(**{**small, **options}).eval()
    with torch.no_grad():
        for parameter in vae.parameters():  # biases and norms, too
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vae


@pytest.mark.parametrize("frames", [1, 5, 13])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_equal_to_stock(name, frames):
    vae = toy(**SHAPES[name])
    pixels = torch.randn(2, 3, frames, 32, 48)
    latents = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(latents_of(vae, pixels), latents, rtol=1e-4, atol=1e-5)
    found, stock = pixels_of(vae, latents), vae.decode(latents).sample
    assert found.abs().max() > 1  # the stock one cuts there
    torch.testing.assert_close(found.clamp(-1, 1), stock, rtol=1e-4, atol=1e-5)


def test_gradients_equal_to_stock():
    vae = toy(**SHAPES["shipped"])
    vae.decoder.conv_out.weight.data *= 0.02  # so that nothing is cut
    vae.decoder.conv_out.bias.data.zero_()
    pixels, weight = torch.randn(1, 3, 9, 16, 16), torch.randn(1, 3, 9, 16, 16)

    def gradients(output):
        assert output.abs().max() < 1
        wanted = [p for name, p in vae.named_parameters() if "quant" not in name or "post" in name]
        return torch.autograd.grad((output * weight).sum(), wanted)

    stock = gradients(vae.decode(vae.encode(pixels).latent_dist.mode()).sample)
    for found, expected in zip(gradients(pixels_of(vae, latents_of(vae, pixels))), stock, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_other_counts_of_frames_are_refused():
    with pytest.raises(ValueError, match="16 frames are given.*as 17"):
        latents_of(toy(**SHAPES["shipped"]), torch.zeros(1, 3, 16, 16, 16))


def test_one_graph_for_each_part():
    options = ["model.base_dim=4", "model.decoder_base_dim=4", "model.z_dim=2"]
    recipe = read_table("train/recipes/autoencoder-wan-emoji.toml", AutoencoderRecipe, options)
    vae = build(recipe)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def compiled(part):
        return torch.compile(part, backend=count, fullgraph=True, dynamic=False)

    encode, decode, loss_of = compiled(latents_of), compiled(pixels_of), compiled(clip_loss)
    for _ in range(3):
        pixels = torch.rand(2, 3, 5, 16, 16) * 2 - 1
        loss = loss_of(decode(vae, encode(vae, pixels)), pixels, recipe)
        loss.backward()
    assert len(graphs) == 3
    plain = clip_loss(pixels_of(vae, latents_of(vae, pixels)), pixels, recipe)
    torch.testing.assert_close(loss, plain)
