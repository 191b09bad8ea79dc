"""Every stock SANA pipeline draws with our transformer: with one block, what it draws with its own."""

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaControlNetModel,
    SanaControlNetPipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintImg2ImgPipeline,
    SanaSprintPipeline,
    SCMScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_512_BIN, ASPECT_RATIO_1024_BIN
from PIL import Image
from tiny_sana import TRANSFORMER, autoencoder, components, generator, stock_transformer, transformer_inputs

from mhla_diffusion.attention import MHLAAttnProcessor
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

CALL = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt", "max_sequence_length": 8}
CALL |= {"use_resolution_binning": False}
SPRINT = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}


def controlnet() -> SanaControlNetModel:
    torch.manual_seed(4)
    options = TRANSFORMER | {"num_layers": 1}
    net = SanaControlNetModel(**options).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # its outputs are zero at first
            parameter += 0.1 * torch.rand_like(parameter)
    return net


def control_image() -> Image.Image:
    return Image.linear_gradient("L").resize((32, 32)).convert("RGB")


# Name: pipeline, what the transformer has besides, components besides, arguments besides.
FAMILY = {
    "text to image": (SanaPipeline, {}, {}, {}),
    "SANA-1.5": (SanaPipeline, {"qk_norm": "rms_norm_across_heads"}, {}, {}),
    "sprint": (SanaSprintPipeline, SPRINT, {"scheduler": SCMScheduler}, {}),
    "sprint, image to image": (
        SanaSprintImg2ImgPipeline,
        SPRINT,
        {"scheduler": SCMScheduler},
        {"image": control_image, "strength": 0.6},
    ),
    "controlnet": (
        SanaControlNetPipeline,
        {},
        {"controlnet": controlnet},
        {"control_image": control_image},
    ),
    "perturbed attention": (SanaPAGPipeline, {}, {}, {}),
    "perturbed attention, no guidance": (SanaPAGPipeline, {}, {}, {"guidance_scale": 1.0}),
}


def made(name: str, transformer):
    cls, _, besides, _ = FAMILY[name]
    pipe = cls(**(components(transformer) | {part: make() for part, make in besides.items()}))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(name: str, pipe, prompt=("a red apple", "two"), seeds=(0, 1)) -> torch.Tensor:
    arguments = {key: value() if callable(value) else value for key, value in FAMILY[name][3].items()}
    if name == "sprint, image to image":
        arguments["image"] = [arguments["image"]] * len(prompt)
    generators = [generator(seed) for seed in seeds]
    return pipe(list(prompt), generator=generators, **(CALL | arguments)).images


@pytest.mark.parametrize("name", FAMILY)
def test_with_one_block_it_draws_what_the_stock_transformer_draws(name):
    options = FAMILY[name][1]
    expected = draw(name, made(name, stock_transformer(**options)))
    one_block = made(name, convert(stock_transformer(**options), block_grid=(1, 1)))
    assert (draw(name, one_block) - expected).abs().max() < 1e-5
    blocks = draw(name, made(name, convert(stock_transformer(**options), block_grid=(3, 2))))
    assert blocks.shape == expected.shape == (2, 3, 32, 32) and blocks.isfinite().all()
    assert (blocks - expected).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["sprint", "controlnet", "perturbed attention"])
def test_it_is_saved_and_loaded_with_our_transformer(name, tmp_path):
    pipe = made(name, convert(stock_transformer(**FAMILY[name][1])))
    pipe.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again.transformer) is MHLASanaTransformer2DModel
    assert (draw(name, again) - draw(name, pipe)).abs().max() < 1e-5


def test_a_picture_of_a_sprint_batch_equals_its_single_run():
    pipe = made("sprint", convert(stock_transformer(**SPRINT)))
    batch = draw("sprint", pipe)
    for i, prompt in enumerate(("a red apple", "two")):
        assert (draw("sprint", pipe, (prompt,), (i,)) - batch[i]).abs().max() < 1e-5


def test_one_pipeline_is_made_from_another_with_its_components():
    """`from_pipe` alone drops a component whose class is a subclass of the annotated one; naming it helps."""
    pipe = made("text to image", convert(stock_transformer()))
    perturbed = SanaPAGPipeline.from_pipe(pipe, transformer=pipe.transformer)
    again = SanaPipeline(**pipe.components)
    assert perturbed.transformer is again.transformer is pipe.transformer
    for other in (perturbed, again):
        other.set_progress_bar_config(disable=True)
    assert torch.equal(draw("text to image", again), draw("text to image", pipe))
    assert draw("perturbed attention", perturbed).isfinite().all()
    # The perturbed layer is as it was, so the first pipeline goes on drawing the same.
    assert torch.equal(draw("text to image", again), draw("text to image", pipe))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"gate": True, "local_conv": 3, "norm_out": True}])
def test_the_perturbed_part_is_each_token_attending_to_itself_alone(options):
    """The same from the operator: one token a block, and no mixing between blocks."""
    alone = convert(stock_transformer(), block_grid=(5, 4), **options)
    attention = alone.transformer_blocks[0].attn1
    for parameter in attention.parameters():
        parameter += 0.2 * torch.rand(parameter.shape, generator=generator(3))
    attention.mixing.weight.copy_(torch.eye(20))
    tokens = torch.randn(2, 20, 16, generator=generator(5))
    # A key without any active feature answers nothing, not even itself: make one active everywhere.
    for projection in (attention.to_q, attention.to_k):
        projection.weight.zero_()
        projection.weight[:, 0] = 1.0
    tokens[:, :, 0] = 1.0
    expected = attention(tokens, grid=(5, 4))
    assert torch.allclose(attention.identity(tokens, (5, 4)), expected, rtol=1e-5, atol=1e-6)


def test_perturbed_attention_leaves_a_layer_of_ours_as_it_was():
    pipe = made("perturbed attention", convert(stock_transformer(), layers=[0], other_layers="softmax"))
    pipe.set_pag_applied_layers(["transformer_blocks.(0|1)"])
    assert draw("perturbed attention", pipe).isfinite().all()
    assert type(pipe.transformer.transformer_blocks[0].attn1.processor) is MHLAAttnProcessor


@torch.no_grad()
def test_control_samples_reach_the_layers_behind_the_first():
    samples = [0.1 * torch.randn(2, 64, 16, generator=generator(1))]
    inputs = transformer_inputs() | {"controlnet_block_samples": samples}
    ours, stock = convert(stock_transformer(num_layers=3), block_grid=(1, 1)), stock_transformer(num_layers=3)
    expected = stock(**inputs).sample
    assert ((ours(**inputs).sample - expected).norm() / expected.norm()) < 1e-5
    assert not torch.allclose(expected, stock(**transformer_inputs()).sample)


def autoencoder_of_32() -> torch.nn.Module:
    """Compresses 32 times, as that of the published models."""
    small = autoencoder()
    config = dict(small.config)
    for name in ("encoder_block_out_channels", "decoder_block_out_channels"):
        config[name] = (4,) * 6
    for name in ("encoder_layers_per_block", "decoder_layers_per_block"):
        config[name] = (1,) * 6
    for name in ("encoder_qkv_multiscales", "decoder_qkv_multiscales"):
        config[name] = ((),) * 6
    for name in ("encoder_block_types", "decoder_block_types"):
        config[name] = "ResBlock"
    config["attention_head_dim"] = 2
    return type(small)(**{name: value for name, value in config.items() if not name.startswith("_")}).eval()


@pytest.mark.parametrize("pipeline", [SanaPipeline, MHLASanaPipeline])
@pytest.mark.parametrize(
    ("size", "bins"),
    [
        (512, ASPECT_RATIO_512_BIN),
        (1024, ASPECT_RATIO_1024_BIN),
        (2048, {"1.0": (2048, 2048), "2.0": (2816, 1408)}),
        (4096, {"1.0": (4096, 4096), "0.25": (2048, 8192)}),
    ],
)
def test_every_resolution_of_the_published_pipelines_is_drawn(pipeline, size, bins):
    transformer = stock_transformer(num_layers=1, sample_size=size // 32)
    pipe = pipeline(**(components(convert(transformer)) | {"vae": autoencoder_of_32()}))
    pipe.set_progress_bar_config(disable=True)
    call = {
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "output_type": "latent",
        "max_sequence_length": 8,
    }
    for height, width in bins.values():
        images = pipe(
            "a red apple", height=int(height), width=int(width), use_resolution_binning=True, **call
        ).images
        assert images.shape == (1, 4, height // 32, width // 32) and images.isfinite().all()


def test_schedulers_are_swapped_as_in_the_stock_pipeline():
    stock, ours = (
        made("text to image", stock_transformer()),
        made("text to image", convert(stock_transformer(), block_grid=(1, 1))),
    )
    schedulers = [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        DPMSolverMultistepScheduler.from_config(stock.scheduler.config, algorithm_type="sde-dpmsolver++"),
    ]
    drawn = []
    for scheduler in schedulers:
        stock.scheduler = scheduler
        ours.scheduler = type(scheduler).from_config(scheduler.config)
        drawn.append(draw("text to image", ours))
        assert (drawn[-1] - draw("text to image", stock)).abs().max() < 1e-5
    assert not torch.equal(drawn[0], drawn[1])
