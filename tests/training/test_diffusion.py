"""The DDPM loss with a learned variance, beside independent restatements of its parts."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from torch.distributions import Normal, kl_divergence

from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.pipelines.dit import dit_scheduler
from mhla_diffusion.training.diffusion import DiffusionLoss, gaussian_divergence, grid_log_likelihood
from mhla_diffusion.training.losses import FlowLoss

TOY = {
    "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 4, "patch_size": 2,
    "in_channels": 2, "num_embeds_ada_norm": 3, "mhla_block_grid": (2, 2),
}  # fmt: skip
BETAS = dit_scheduler("ddim").betas


def model(out_channels=4):
    torch.manual_seed(0)
    made = MHLADiTTransformer2DModel(**TOY, out_channels=out_channels).train()
    made.label_dropout = 0.0
    return made


def batch(times):
    torch.manual_seed(1)
    count = len(times)
    return (
        torch.randn(count, 2, 4, 4),
        torch.randn(count, 2, 4, 4),
        torch.tensor(times),
        torch.arange(count) % 4,
    )


def test_noisy_latents_and_squared_error_are_those_of_the_scheduler():
    network = model(out_channels=2)
    latents, noise, time, labels = batch([0, 10, 500, 999])
    loss = DiffusionLoss(network, BETAS)(latents, noise, time, labels)
    noisy = DDPMScheduler.from_config(dit_scheduler("ddpm").config).add_noise(latents, noise, time)
    predicted = network(noisy, timestep=time, class_labels=labels).sample
    torch.testing.assert_close(loss, (predicted - noise).square().mean((1, 2, 3)), rtol=1e-4, atol=1e-5)


def test_bound_is_the_divergence_from_the_posterior():
    """Written once more in float64, by torch.distributions, with the posterior from Bayes' rule."""
    network = model()
    latents, noise, time, labels = batch([1, 30, 400, 999])
    module = DiffusionLoss(network, BETAS, variational_weight=0.002)
    with torch.no_grad():
        loss = module(latents, noise, time, labels)
        betas = BETAS.double()
        alphas = torch.cumprod(1 - betas, 0)
        for i, t in enumerate(time.tolist()):
            noisy = alphas[t].sqrt() * latents[i].double() + (1 - alphas[t]).sqrt() * noise[i].double()
            output = network(
                noisy[None].float(), timestep=time[i : i + 1], class_labels=labels[i : i + 1]
            ).sample[0]
            eps, position = output.double().split(2)

            def posterior(start, noisy=noisy, t=t):
                # q(x_{t-1} | x_t, x_0) ~ N(x_t | sqrt(1 - beta) x_{t-1}, beta) N(x_{t-1} | sqrt(a) x_0, 1 - a)
                precision = (1 - betas[t]) / betas[t] + 1 / (1 - alphas[t - 1])
                weighted = (1 - betas[t]).sqrt() * noisy / betas[t] + alphas[t - 1].sqrt() * start / (
                    1 - alphas[t - 1]
                )
                return weighted / precision, 1 / precision

            mean, variance = posterior(latents[i].double())
            guess, _ = posterior((noisy - (1 - alphas[t]).sqrt() * eps) / alphas[t].sqrt())
            share = (position + 1) / 2
            predicted_variance = (share * betas[t].log() + (1 - share) * variance.log()).exp()
            bits = kl_divergence(
                Normal(mean, variance.sqrt()), Normal(guess, predicted_variance.sqrt())
            ).mean() / math.log(2)
            expected = (eps - noise[i]).square().mean() + 0.002 * 1000 * bits
            assert loss[i].item() == pytest.approx(expected.item(), rel=1e-3)


def test_last_term_is_the_likelihood_on_a_grid_of_pixels():
    values = torch.linspace(
        -1, 1, 256
    )  # every cell of the grid: the likelihoods of one distribution add up to 1
    for mean, spread in ((0.2, 0.1), (-0.9, 0.3), (0.0, 0.01)):
        log = grid_log_likelihood(values, torch.tensor(mean), torch.tensor(2 * math.log(spread)))
        assert log.exp().sum().item() == pytest.approx(1, abs=1e-4)
    network = model()
    latents, noise, time, labels = batch([0, 0])
    module = DiffusionLoss(network, BETAS, variational_weight=1.0)
    assert torch.isfinite(module(latents * 0.3, noise, time, labels)).all()


def test_divergence_is_that_of_torch():
    torch.manual_seed(2)
    mean, log, other, other_log = torch.randn(4, 5)
    expected = kl_divergence(Normal(mean, (log / 2).exp()), Normal(other, (other_log / 2).exp()))
    torch.testing.assert_close(gaussian_divergence(mean, log, other, other_log), expected)


def test_the_bound_teaches_the_variance_and_not_the_noise():
    network = model()
    latents, noise, time, labels = batch([5, 50, 500, 900])
    head = network.proj_out_2

    def gradient(weight):
        network.zero_grad()
        DiffusionLoss(network, BETAS, variational_weight=weight)(
            latents, noise, time, labels
        ).sum().backward()
        return head.weight.grad.unflatten(0, (4, 4)).clone()  # (patch, channel, width)

    without, with_bound = gradient(0.0), gradient(0.01)
    assert torch.equal(without[:, :2], with_bound[:, :2])
    assert not without[:, 2:].any() and with_bound[:, 2:].any()


def test_the_learned_variance_is_read_as_the_scheduler_reads_it():
    """At -1 the smallest and at 1 the largest variance, as Diffusers' DDPM samples with `learned_range`."""
    scheduler = dit_scheduler("ddpm")
    module = DiffusionLoss(model(), BETAS)
    for t in (1, 400, 999):
        for position in (-1.0, 0.3, 1.0):
            log = scheduler._get_variance(t, predicted_variance=torch.tensor(position))
            share = (position + 1) / 2
            assert log.item() == pytest.approx(
                (share * module.most[t] + (1 - share) * module.least[t]).item(), rel=1e-4
            )


def test_wrong_channels_are_named():
    with pytest.raises(ValueError, match="3 output channels for 2 of the latents: give 2, or 4 to learn"):
        DiffusionLoss(model(out_channels=3), BETAS)
    with pytest.raises(
        ValueError, match='loss.kind = "flow" predicts as many channels .* has out_channels = 4'
    ):
        FlowLoss(model(out_channels=4))


def test_flow_matching_of_classes():
    network = model(out_channels=2)
    latents, noise, _, labels = batch([0, 0, 0])
    sigma = torch.tensor([0.1, 0.5, 0.9])
    loss = FlowLoss(network)(latents, noise, sigma, labels)
    level = sigma.view(-1, 1, 1, 1)
    velocity = network(
        (1 - level) * latents + level * noise, timestep=1000 * sigma, class_labels=labels
    ).sample
    torch.testing.assert_close(loss, (velocity - (noise - latents)).square().mean((1, 2, 3)))
