"""The feed-forwards in our classes: the stock ones' weights, keys and output."""

import copy

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv
from families import SANA, SANA_VIDEO
from peft import LoraConfig, inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion import convert, feed_forward
from mhla_diffusion.feed_forward import (
    GatedConvFeedForward,
    GatedTemporalConvFeedForward,
    with_gelu_in_the_product,
)

KINDS = {
    "image": (GLUMBConv, GatedConvFeedForward, (2, 8, 5, 6)),
    "video": (GLUMBTempConv, GatedTemporalConvFeedForward, (2, 3, 5, 6, 8)),
    "linear": (FeedForward, None, (2, 30, 8)),
}
# Tests of convolutions.
CONVOLUTIONS = pytest.mark.parametrize("kind", ["image", "video"])
CASES = [
    ("image", {}),
    ("image", {"residual_connection": False}),
    ("image", {"norm_type": "rms_norm", "residual_connection": False}),
    ("video", {}),
    ("video", {"residual_connection": False}),
    ("linear", {"activation_fn": "gelu-approximate", "inner_dim": 20}),
]


def pair(kind, options, device="cpu", dtype=torch.float32):
    stock_class, ours_class, shape = KINDS[kind]
    torch.manual_seed(0)
    stock = stock_class(8, 8, 2.5, **options).to(device, dtype)
    x = torch.randn(shape).to(device, dtype)
    if kind == "linear":
        return stock, with_gelu_in_the_product(stock), x
    if kind == "image":  # as tokens become a picture
        x = x.contiguous(memory_format=torch.channels_last)
    return stock, ours_class.of(stock), x


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_it_is_the_stock_module_on_the_same_tensors(kind, options):
    stock, ours, x = pair(kind, options)
    assert list(stock.state_dict()) == list(ours.state_dict())
    assert all(a is b for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    assert torch.equal(ours(x), stock(x))
    grads = (torch.autograd.grad(part(x).square().sum(), list(part.parameters())) for part in (stock, ours))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@CONVOLUTIONS
@pytest.mark.parametrize("first", [True, False])
@torch.no_grad()
def test_convolutions_that_are_told_to_wrap_around_do_as_the_stock_ones(kind, first):
    """Programs for pictures without seams set `padding_mode` in every convolution they find, before or after."""
    stock, ours, x = pair(kind, {})
    zeros = stock(x)
    for part in (stock, ours):
        part.conv_depth.padding_mode = "circular"
    ours = KINDS[kind][1].of(stock) if first else ours
    assert torch.equal(ours(x), stock(x)) and not torch.equal(stock(x), zeros)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
@CONVOLUTIONS
@pytest.mark.parametrize("target", ["conv_inverted", "conv_depth", "conv_point"])
def test_an_adapter_on_a_convolution_acts_as_on_the_stock_one(kind, target):
    stock, ours, x = pair(kind, {})
    outputs = []
    for part in (copy.deepcopy(stock), copy.deepcopy(ours)):
        torch.manual_seed(1)
        adapted = inject_adapter_in_model(
            LoraConfig(r=40, target_modules=[target], init_lora_weights=False), part
        )
        outputs.append(adapted(x))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], stock(x))


def test_an_adapter_before_gelu_acts_as_on_the_stock_one():
    stock, ours, x = pair("linear", {"activation_fn": "gelu-approximate"})
    outputs = []
    for part in (copy.deepcopy(stock), copy.deepcopy(ours)):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["net.0.proj"], init_lora_weights=False)
        outputs.append(inject_adapter_in_model(config, part)(x))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], stock(x))


@torch.no_grad()
@CONVOLUTIONS
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_a_model_told_to_use_plain_torch_starts_no_kernel(kind, backend, monkeypatch):
    family = {"image": SANA, "video": SANA_VIDEO}[kind]
    model = convert(family.stock_model(), block_grid=(1,) * len(family.default_grid))
    expected = family.run(model)
    model.set_mhla_backend(backend)
    monkeypatch.setattr(feed_forward, "gated_depthwise", None)  # fails where it is called
    torch.testing.assert_close(family.run(model), expected, rtol=1e-4, atol=1e-5)
    model.set_mhla_backend("auto")
    with pytest.raises(TypeError):
        family.run(model)


@pytest.mark.parametrize("activation", ["gelu", "geglu", "linear-silu"])
def test_other_activations_keep_the_stock_module(activation):
    stock = FeedForward(8, activation_fn=activation)
    assert with_gelu_in_the_product(stock) is stock


class Operators(TorchDispatchMode):
    """Names of what torch is asked to compute inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_weights_that_are_no_plain_tensors_get_the_operators_that_they_know(kind, options):
    """Quantised ones on a GPU; stood in for by tensors without values, another subclass that says it is on a GPU."""
    stock_class, ours_class, shape = KINDS[kind]
    found = []
    with FakeTensorMode(), torch.device("cuda"):
        stock, x = stock_class(8, 8, 2.5, **options), torch.randn(shape)
        ours = with_gelu_in_the_product(stock) if ours_class is None else ours_class.of(stock)
        for part in (stock, ours):
            with Operators() as seen:
                part(x)
            found.append(
                {"convolution", "addmm", "gelu", "_addmm_activation", "gated_depthwise"} & seen.names
            )
    assert found[0] == found[1] in ({"convolution"}, {"addmm", "gelu"})


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_on_the_gpu_it_computes_what_the_stock_module_does(kind, options, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    stock, ours, x = pair(kind, options, "cuda", dtype)
    expected = copy.deepcopy(stock).double()(x.double())
    assert (ours(x) - expected).norm() < tolerance * expected.norm()
    compiled = torch.compile(ours, fullgraph=True, dynamic=False)(x)
    assert (compiled - expected).norm() < tolerance * expected.norm()


@pytest.mark.gpu
@torch.no_grad()
@CONVOLUTIONS
def test_on_the_gpu_float32_has_the_convolutions_own_rounding(kind):
    """With torch's defaults, TF32 in convolutions and not in products: as on the stock module."""
    stock, ours, x = pair(kind, {}, "cuda")
    x = x if kind == "image" else x.flatten(0, 1).permute(0, 3, 1, 2)
    assert torch.equal(ours.conv_inverted(x), stock.conv_inverted(x))
    assert ours.conv_inverted.is_product(x.bfloat16()) and not ours.conv_inverted.is_product(x)
    with torch.autocast("cuda", torch.bfloat16):
        assert ours.conv_inverted.is_product(x)
        expected = stock.conv_inverted(x)
        assert (ours.conv_inverted(x) - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_autocast_computes_in_its_own_dtype_on_the_gpu(kind, options):
    stock, ours, x = pair(kind, options, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected, got = stock(x), ours(x)
        if kind == "linear":
            assert ours.net[0](x).dtype == stock.net[0](x).dtype == torch.bfloat16
    assert got.dtype == expected.dtype and (got - expected).norm() < 2e-2 * expected.norm()
