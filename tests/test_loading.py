"""load_pipeline: the right class for a folder, and one line that says what to do when there is none."""

import json
import shutil

import pytest
import torch
from diffusers import SanaPipeline
from safetensors.torch import load_file, save_file
from tiny_sana import components, generator, stock_pipeline, stock_transformer

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of pipelines: `ours`, and `stock` with our transformer in it."""
    root = tmp_path_factory.mktemp("weights")
    transformer = convert(stock_transformer())
    MHLASanaPipeline(**components(transformer), default_steps=2, max_sequence_length=8).save_pretrained(
        root / "ours"
    )
    stock_pipeline(transformer).save_pretrained(root / "stock")
    return root


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of `ours` to break."""
    shutil.copytree(saved / "ours", tmp_path / "copy")
    return tmp_path / "copy"


def refused(name, **arguments) -> str:
    with pytest.raises(ValueError) as caught:
        load_pipeline(name, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_index_decides_the_class(saved):
    ours, stock = load_pipeline(saved / "ours"), load_pipeline(str(saved / "stock"))
    assert type(ours) is MHLASanaPipeline and type(stock) is SanaPipeline
    assert type(ours.transformer).__name__ == type(stock.transformer).__name__ == "MHLASanaTransformer2DModel"
    arguments = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    arguments |= {"max_sequence_length": 8, "complex_human_instruction": [], "use_resolution_binning": False}
    pictures = [pipe("a whale", generator=generator(0), **arguments).images for pipe in (ours, stock)]
    assert (pictures[0] - pictures[1]).abs().max() < 1e-5


def test_a_pipeline_is_found_by_name_and_arguments_are_passed_on(saved, monkeypatch):
    monkeypatch.setenv("MHLA_WEIGHTS", str(saved))
    pipe = load_pipeline("ours", torch_dtype=torch.bfloat16, default_steps=5)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.config.default_steps == 5
    assert pipe.transformer.transformer_blocks[0].attn1.mixing.weight.dtype == torch.float32


def test_a_missing_pipeline_names_every_place_and_what_there_is(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("MHLA_WEIGHTS", str(saved))
    monkeypatch.chdir(tmp_path)
    message = refused("nowhere")
    assert str(saved / "nowhere") in message and "clone the repository" in message
    assert "found: " in message and "ours" in message and "stock" in message
    monkeypatch.delenv("MHLA_WEIGHTS")
    assert str(saved / "ours") in refused(saved / "oours")  # a slip: what lies beside it


def test_the_hub_is_asked_only_when_told_and_only_for_its_names(saved, tmp_path):
    # The Hub's own cache layout; the tests run offline, so what is not in it cannot be had.
    cached = tmp_path / "models--somebody--toy"
    shutil.copytree(saved / "ours", cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    pipe = load_pipeline("somebody/toy", hub=True, cache_dir=tmp_path)
    assert type(pipe) is MHLASanaPipeline and pipe.config.default_steps == 2
    with pytest.raises(ValueError, match="no pipeline 'somebody/toy'"):
        load_pipeline("somebody/toy", cache_dir=tmp_path)
    assert "owner/name" in refused("nowhere", hub=True)
    assert "could be had from the Hub" in refused("somebody/else", hub=True, cache_dir=tmp_path)


def test_a_folder_of_pipelines_names_them(saved):
    message = refused(saved)
    assert "holds the pipelines ours, stock" in message and str(saved / "ours") in message


@pytest.mark.parametrize(
    "file", ["Wan2.1_VAE.pth", "checkpoints/Sana.pth", "model.safetensors", "0050000.pt"]
)
def test_an_original_layout_names_the_converter(tmp_path, file):
    folder = tmp_path / "original"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).touch()
    message = refused(folder)
    assert "original layout" in message and file in message
    assert f"mhla convert {folder / file} {folder}-mhla --pipeline" in message
    with pytest.raises(ValueError, match="original layout"):
        MHLASanaPipeline.from_pretrained(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "Wan2.1.pth"])
def test_a_file_of_weights_names_the_converter(tmp_path, file):
    (tmp_path / file).touch()
    message = refused(tmp_path / file)
    assert "a file of weights, not a pipeline folder" in message
    assert f"mhla convert {tmp_path / file} {tmp_path / file.rpartition('.')[0]}-mhla --pipeline" in message


def test_a_file_cut_short_is_named(copy):
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = refused(copy)
    assert str(weights) in message and "cut short" in message


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_our_class_names_a_file_cut_short(copy, part):
    weights = next((copy / part).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{weights} is cut short"):
        MHLASanaPipeline.from_pretrained(copy)


def test_a_missing_component_is_named(copy):
    shutil.rmtree(copy / "vae")
    assert "lacks the component folder vae/" in refused(copy)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", "the weights (.safetensors)"),
        ("text_encoder/config.json", "the config.json"),
        ("scheduler/scheduler_config.json", "the scheduler_config.json"),
        ("tokenizer/tokenizer.json", "the vocabulary (tokenizer.json)"),
    ],
)
def test_a_missing_file_is_named(copy, file, named):
    """Without its vocabulary, transformers would build an empty tokenizer, and every picture would be wrong."""
    (copy / file).unlink()
    assert f"lacks {named} in the component {file.split('/')[0]}/" in refused(copy)


def test_weights_of_a_variant_alone_are_named(copy):
    for path in copy.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    assert refused(copy).endswith("it holds weights of the variant fp16, give variant='fp16'")
    assert type(load_pipeline(copy, variant="fp16")) is MHLASanaPipeline


def test_weights_that_do_not_fit_their_config_are_refused(copy):
    config = copy / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 7}))
    assert f"{copy} cannot be loaded" in refused(copy)


def test_a_weight_that_is_lacking_is_named(copy):
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    lost = sorted(weights)[0]
    del weights[lost]
    save_file(weights, path)
    assert f"lacks 1 weights, the first is {lost}" in refused(copy)


def edit_index(folder, **changes) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_stock_class_named_for_our_weights_is_refused(copy):
    """The stock model would load them, drop the mixing with a log line, and draw other pictures."""
    edit_index(copy, transformer=["diffusers", "SanaTransformer2DModel"])
    message = refused(copy)
    assert "would drop" in message
    assert 'write "transformer": ["mhla_diffusion", "MHLASanaTransformer2DModel"]' in message
    with pytest.raises(ValueError, match="would drop"):
        MHLASanaPipeline.from_pretrained(copy)
    edit_index(copy, transformer=["mhla_diffusion", "MHLASanaTransformer2DModel"])
    assert type(load_pipeline(copy)) is MHLASanaPipeline


def test_a_class_that_this_version_lacks_is_named(copy):
    edit_index(copy, _class_name="MHLAFluxPipeline")
    assert "'MHLAFluxPipeline'" in refused(copy) and "upgrade" in refused(copy)
    edit_index(copy, _class_name="MHLASanaPipeline", transformer=["mhla_diffusion", "MHLANewModel"])
    assert "'MHLANewModel'" in refused(copy) and "upgrade" in refused(copy)


def test_a_single_model_folder_is_not_a_pipeline(saved):
    assert "single model" in refused(saved / "ours" / "transformer")
