import pytest
import torch
from diffusers import SanaTransformer2DModel

from mhla_diffusion.training.config import EMAConfig, FlowConfig
from mhla_diffusion.training.ema import EMA
from mhla_diffusion.training.losses import FlowLoss, draw_sigma, shift_sigma


def test_sigma_densities():
    def draw(**settings):
        return draw_sigma(20000, FlowConfig(**settings), torch.Generator().manual_seed(0))

    uniform = draw(weighting="uniform")
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.005
    normal = draw(logit_mean=0.5, logit_std=2.0)
    logits = torch.logit(normal.double())
    assert abs(logits.mean() - 0.5) < 0.05 and abs(logits.std() - 2.0) < 0.05
    assert torch.allclose(draw(shift=3.0), 3 * draw() / (1 + 2 * draw()))
    assert shift_sigma(torch.tensor([0.0, 1.0]), 3.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_loss_is_flow_matching(scale):
    torch.manual_seed(0)
    model = SanaTransformer2DModel(
        in_channels=2, out_channels=2, num_attention_heads=1, attention_head_dim=8, num_layers=1,
        num_cross_attention_heads=1, cross_attention_head_dim=8, cross_attention_dim=8, caption_channels=8,
        sample_size=4, timestep_scale=scale,
    )  # fmt: skip
    x, noise, sigma = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4), torch.tensor([0.1, 0.5, 0.9])
    caption, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.long)
    losses = FlowLoss(model)(x, noise, sigma, caption, mask)
    for i in range(3):
        mixed = (1 - sigma[i]) * x[i] + sigma[i] * noise[i]
        velocity = model(mixed[None], encoder_hidden_states=caption[i : i + 1], encoder_attention_mask=mask[i : i + 1],
                         timestep=sigma[i : i + 1] * 1000 * scale).sample[0]  # fmt: skip
        torch.testing.assert_close(losses[i], (velocity - (noise[i] - x[i])).square().mean())


def test_ema_follows_its_formula_and_gives_the_weights_back():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = EMA({"w": weight}, EMAConfig(decay=0.9, warmup=10.0))
    assert ema.decay(0) == pytest.approx(0.1) and ema.decay(1000) == 0.9
    expected = weight.detach().clone()
    for step in range(5):
        with torch.no_grad():
            weight += 1
        ema.update(step)
        expected = ema.decay(step) * expected + (1 - ema.decay(step)) * weight.detach()
    torch.testing.assert_close(ema.average["w"], expected)
    before = weight.detach().clone()
    with pytest.raises(KeyError), ema.applied():
        assert torch.equal(weight, ema.average["w"])
        raise KeyError
    assert torch.equal(weight, before)
    assert EMA({"w": weight}, EMAConfig(decay=0.9, warmup=0.0)).decay(0) == 0.9
