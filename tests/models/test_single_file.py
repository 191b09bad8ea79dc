"""`from_single_file` of our models: what `mhla convert` and `from_pretrained` make of the same file, in one call."""

import os

import original_layouts as original
import pytest
import tiny_sana
import torch
from safetensors.torch import save_file

from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.conversion import convert_folder


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def files(tmp_path):
    torch.save(original.dit_state(original.stock_dit()), tmp_path / "dit.pt")
    torch.save({"state_dict": original.sana_state(tiny_sana.stock_transformer())}, tmp_path / "sana.pth")
    save_file(original.official_state(original.stock_dit()), tmp_path / "official.safetensors")
    return tmp_path


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = ({**m.state_dict(), **dict(m.named_buffers())} for m in (one, other))
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "name", "config", "options"),
    [
        (MHLADiTTransformer2DModel, "dit.pt", original.HEADS, {"layers": [1], "gate": True, "local_conv": 3}),
        (MHLASanaTransformer2DModel, "sana.pth", original.SANA_HEADS, {"block_grid": (2, 3)}),
        (MHLADiTTransformer2DModel, "official.safetensors", original.HEADS, {}),
        (MHLADiTTransformer2DModel, "official.safetensors", original.HEADS, {"block_grid": (2, 2)}),
    ],
)
def test_it_is_what_a_converted_folder_loads(files, cls, name, config, options, dtype):
    convert_folder(files / name, files / "out", config=config, **options)
    expected = cls.from_pretrained(files / "out", torch_dtype=dtype)
    given = {f"mhla_{key}": value for key, value in options.items()}
    read = cls.from_single_file(files / name, config=config, torch_dtype=dtype, **given)
    assert type(read) is cls and not read.training and same(read, expected)
    assert all(parameter.requires_grad for parameter in read.parameters())
    stored = [{k: v for k, v in m.config.items() if not k.startswith("_")} for m in (read, expected)]
    assert stored[0] == stored[1]
    read.save_pretrained(files / "saved")  # no two weights share memory
    assert same(cls.from_pretrained(files / "saved", torch_dtype=dtype), expected)


@torch.no_grad()
def test_it_computes_what_the_stock_class_does(files):
    heads = {"config": original.SANA_HEADS}
    read = MHLASanaTransformer2DModel.from_single_file(files / "sana.pth", mhla_block_grid=(1, 1), **heads)
    stock, inputs = tiny_sana.stock_transformer(), tiny_sana.transformer_inputs()
    expected = stock(**inputs).sample
    assert ((read(**inputs).sample - expected).norm() / expected.norm()) < 1e-5
    back = restore(read).state_dict()
    assert all(torch.equal(back[name], x) for name, x in stock.state_dict().items())


def test_weights_in_diffusers_layout_come_with_their_config(tmp_path):
    stock = tiny_sana.stock_transformer()
    stock.save_pretrained(tmp_path / "pipe" / "transformer")
    file = tmp_path / "pipe" / "transformer" / "diffusion_pytorch_model.safetensors"
    read = MHLASanaTransformer2DModel.from_single_file(
        str(file), config=str(tmp_path / "pipe"), subfolder="transformer", local_files_only=True
    )
    assert same(read, convert(stock))
    read.save_pretrained(tmp_path / "ours")
    file = tmp_path / "ours" / "diffusion_pytorch_model.safetensors"
    assert same(MHLASanaTransformer2DModel.from_single_file(file, config=tmp_path / "ours"), read)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nothing.pt", {}, "there is no such file"),
        ("dit.pt", {}, "shapes do not tell the number of heads"),
        ("dit.pt", {"config": "nowhere"}, "there is no config nowhere"),
        ("dit.pt", {"config": original.HEADS, "block_grid": (2, 2)}, "does not know 'block_grid'"),
        ("dit.pt", {"config": original.HEADS, "mhla_block_grid": (0, 2)}, "two positive integers"),
        (
            "dit.pt",
            {"config": original.HEADS, "mhla_gates": True},
            r"^from_single_file\(\) has .mhla_gates., which .* does not know, did you mean mhla_gate\?",
        ),
        ("sana.pth", {"config": original.SANA_HEADS}, "holds the weights of a MHLASana"),
        ("code.pt", {}, "posix.system, which is code and not weights"),
        ("empty.pt", {}, "is empty"),
    ],
)
def test_a_mistake_is_one_line(files, name, arguments, message):
    (files / "empty.pt").touch()
    torch.save({"model": {"a": torch.ones(1)}, "x": Touch(files / "ran")}, files / "code.pt")
    with pytest.raises(ValueError, match=message) as caught:
        MHLADiTTransformer2DModel.from_single_file(files / name, **arguments)
    told = str(caught.value)
    assert "\n" not in told and told.count(str(files / name)) < 2 and not (files / "ran").exists()


def test_a_file_that_is_not_the_one_on_record_is_refused(files):
    (files / "SHA256SUMS").write_text(f"{'0' * 64}  dit.pt\n")
    with pytest.raises(ValueError, match="does not have the sha256"):
        MHLADiTTransformer2DModel.from_single_file(files / "dit.pt", config=original.HEADS)
