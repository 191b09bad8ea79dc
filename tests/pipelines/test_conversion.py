"""`convert_folder`: pipelines, model folders and original files, whole or not at all."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import original_layouts as original
import pytest
import tiny_dit
import tiny_sana
import torch
from diffusers import DiffusionPipeline, DiTPipeline

from mhla_diffusion.cli import main
from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.mixing import interpolate_mixing
from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines import conversion
from mhla_diffusion.pipelines.conversion import convert_folder

STOCK = {"sana": tiny_sana.stock_transformer, "dit": tiny_dit.stock_transformer}
OURS = {"sana": MHLASanaTransformer2DModel, "dit": MHLADiTTransformer2DModel}


def refused(source, out, **options) -> str:
    with pytest.raises(ValueError) as caught:
        convert_folder(source, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(".*part"))
    return str(caught.value)


def equal_states(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


@pytest.fixture
def stock(tmp_path):
    """A stock SANA folder to break."""
    tiny_sana.stock_transformer().save_pretrained(tmp_path / "stock", max_shard_size="10KB")
    return tmp_path / "stock"


def edit(path, **changes) -> None:
    stored = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


def test_a_pipeline_folder_draws_as_the_converted_model_does(tmp_path):
    stock = tiny_sana.stock_pipeline()
    stock.save_pretrained(tmp_path / "stock")
    convert_folder(tmp_path / "stock", tmp_path / "new" / "mhla", block_grid=(2, 2))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mhla"]
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "new" / "mhla")
    assert type(loaded.transformer) is MHLASanaTransformer2DModel
    assert loaded.transformer.config.mhla_block_grid == [2, 2]
    inputs = tiny_sana.transformer_inputs()
    expected = convert(stock.transformer, block_grid=(2, 2))(**inputs).sample
    torch.testing.assert_close(loaded.transformer(**inputs).sample, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", ["10KB", "1GB"])
@pytest.mark.parametrize("kind", STOCK)
def test_converted_equals_convert_and_restored_equals_the_original_bit_for_bit(tmp_path, kind, size, dtype):
    model = STOCK[kind]().to(dtype)
    model.save_pretrained(tmp_path / "stock", max_shard_size=size)
    convert_folder(tmp_path / "stock", tmp_path / "mhla", block_grid=(2, 3), gate=True, local_conv=3)
    loaded = OURS[kind].from_pretrained(tmp_path / "mhla", dtype=dtype)
    assert equal_states(loaded, convert(model, block_grid=(2, 3), gate=True, local_conv=3))
    assert equal_states(restore(loaded), model)
    names = [sorted(path.name for path in (tmp_path / x).glob("*.safetensors*")) for x in ("stock", "mhla")]
    assert names[0] == names[1] and (len(names[0]) == 1) == (size == "1GB")
    for path in (tmp_path / "mhla").glob("*-of-*.safetensors"):
        assert path.stat().st_size > 0.5 * (tmp_path / "stock" / path.name).stat().st_size


def test_a_transformer_folder_keeps_its_dtype_and_the_layers_chosen(tmp_path):
    tiny_sana.stock_transformer().to(torch.bfloat16).save_pretrained(tmp_path / "stock")
    convert_folder(tmp_path / "stock", tmp_path / "mhla", block_grid=(2, 2), layers=[1])
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path / "mhla", dtype=torch.bfloat16)
    assert loaded.config.mhla_layers == [1]
    stored = json.loads((tmp_path / "mhla" / "config.json").read_text())
    assert stored["_class_name"] == "MHLASanaTransformer2DModel"
    weights = next((tmp_path / "mhla").glob("*.safetensors")).stat().st_size
    assert weights < 1.1 * next((tmp_path / "stock").glob("*.safetensors")).stat().st_size


def test_a_variant_in_shards_and_further_mhla_fields(tmp_path):
    model = tiny_sana.stock_transformer().half()
    for variant in ("fp16", "other"):
        model.save_pretrained(tmp_path / "stock", max_shard_size="10KB", variant=variant)
    fields = {"mhla_mixing_init": "uniform", "mhla_norm_out": True, "_diffusers_version": "0.1"}
    (tmp_path / "fields.json").write_text(json.dumps(fields))
    convert_folder(tmp_path / "stock", tmp_path / "mhla", variant="fp16", config=tmp_path / "fields.json")
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path / "mhla", dtype=torch.float16)
    assert equal_states(loaded, convert(model, mixing_init="uniform", norm_out=True))
    assert "variants fp16, other: choose one with --variant" in refused(tmp_path / "stock", tmp_path / "out")


def test_an_early_dit_folder_with_pickled_weights_is_read(tmp_path):
    # As the first DiT repositories have it: an old class name, idle fields of other models, a .bin file.
    pipe = tiny_dit.stock_pipeline()
    pipe.save_pretrained(tmp_path / "stock")
    folder = tmp_path / "stock" / "transformer"
    idle = {"cross_attention_dim": None, "only_cross_attention": False, "attention_type": "default"}
    edit(folder / "config.json", _class_name="Transformer2DModel", **idle)
    config = json.loads((folder / "config.json").read_text()) | idle
    (folder / "config.json").write_text(json.dumps(config))
    next(folder.glob("*.safetensors")).unlink()
    torch.save(pipe.transformer.state_dict(), folder / "diffusion_pytorch_model.bin")
    edit(tmp_path / "stock" / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    convert_folder(tmp_path / "stock", tmp_path / "mhla", layers=[1], block_grid=(2, 2))
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
    assert type(loaded) is DiTPipeline
    assert equal_states(loaded.transformer, convert(pipe.transformer, layers=[1], block_grid=(2, 2)))
    (folder / "config.json").write_text(json.dumps(config | {"only_cross_attention": True}))
    assert "only_cross_attention=True, which DiTTransformer2DModel does not know" in refused(
        tmp_path / "stock", tmp_path / "no"
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An MHLA model in shards whose mixing matrices are no longer the initial ones."""
    torch.manual_seed(1)
    model = convert(tiny_sana.stock_transformer(), block_grid=(4, 4), gate=True, per_head_mixing=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mixing" in name:
                parameter.uniform_()
    folder = tmp_path_factory.mktemp("trained") / "mhla"
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder, model


def test_an_mhla_model_gets_another_block_grid(tmp_path, trained):
    folder, model = trained
    done = convert_folder(folder, tmp_path / "out", block_grid=(2, 3))
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path / "out")
    assert loaded.config.mhla_block_grid == [2, 3] and loaded.config.mhla_gate
    old, new = model.state_dict(), loaded.state_dict()
    errors = {}
    for key, value in old.items():
        if "mixing" not in key:
            assert torch.equal(new[key], value)
            continue
        expected = interpolate_mixing(value.double(), (4, 4), (2, 3))
        torch.testing.assert_close(new[key], expected.float(), rtol=1e-6, atol=1e-7)
        back = interpolate_mixing(expected, (2, 3), (4, 4))
        errors[key] = ((back - value).norm() / value.norm()).item()
    record = json.loads((tmp_path / "out" / "mhla_conversion.json").read_text())
    assert record["round_trip_error"] == pytest.approx(errors, rel=1e-5) and min(errors.values()) > 0.01
    line = next(line for line in done.report() if "there and back differs by" in line)
    assert "from (4, 4) to (2, 3)" in line and f"at most {max(errors.values()):.2e}" in line


def test_the_same_block_grid_changes_nothing(tmp_path, trained):
    folder, model = trained
    done = convert_folder(folder, tmp_path / "out", block_grid=(4, 4))
    assert equal_states(MHLASanaTransformer2DModel.from_pretrained(tmp_path / "out"), model)
    assert not any("interpolated" in line for line in done.report())


def test_an_mhla_model_keeps_its_layers_and_options(tmp_path, trained):
    out = tmp_path / "out"
    assert "with block_grid (4, 4) already: give another one" in refused(trained[0], out)
    for option in ({"layers": [0]}, {"gate": True}, {"local_conv": 3}):
        assert "keeps the layers and options" in refused(trained[0], out, block_grid=(2, 2), **option)


def test_a_dry_run_says_what_each_key_becomes_and_writes_nothing(tmp_path, stock):
    before = sorted(tmp_path.rglob("*"))
    done = convert_folder(stock, stock, layers=[1], dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    lines = done.plan.key_map()
    model = convert(tiny_sana.stock_transformer(), layers=[1])
    assert {line.split(" -> ")[1].split(" (")[0] for line in lines} == model.state_dict().keys()
    assert "(new) -> transformer_blocks.1.attn1.mixing.weight (16, 16)" in lines
    torch.save({"model": original.official_state(original.stock_dit())}, tmp_path / "a.pt")
    lines = convert_folder(
        tmp_path / "a.pt", tmp_path / "o", config=original.HEADS, dry_run=True
    ).plan.key_map()
    name = "blocks.0.attn.to_qkv.weight -> transformer_blocks.0.attn1.to_k.weight (16, 16) (part 2 of 3)"
    assert name in lines
    assert any(line.startswith("pos_embed -> (left out") for line in lines)
    assert not (tmp_path / "o").exists()


def test_an_original_file_becomes_a_pipeline_with_the_parts_of_another(tmp_path):
    pipe = tiny_sana.stock_pipeline()
    pipe.save_pretrained(tmp_path / "parts")
    (tmp_path / "Sana" / "checkpoints").mkdir(parents=True)
    new = tiny_sana.stock_transformer(seed=7)
    torch.save({"state_dict": original.sana_state(new)}, tmp_path / "Sana" / "checkpoints" / "Sana.pth")
    options = {"config": original.SANA_HEADS, "block_grid": (1, 1)}
    convert_folder(tmp_path / "Sana", tmp_path / "out", pipeline=tmp_path / "parts", **options)
    loaded = load_pipeline(tmp_path / "out")
    inputs = tiny_sana.transformer_inputs()
    torch.testing.assert_close(
        loaded.transformer(**inputs).sample, new(**inputs).sample, rtol=1e-4, atol=1e-5
    )
    assert equal_states(loaded.vae, pipe.vae)

    tiny_dit.stock_pipeline().save_pretrained(tmp_path / "dit")
    source, out = tmp_path / "Sana", tmp_path / "no"
    assert "has a DiTTransformer2DModel as its transformer" in refused(
        source, out, pipeline=tmp_path / "dit", **options
    )
    assert "is no pipeline folder" in refused(source, out, pipeline=tmp_path, **options)
    assert "is inside" in refused(
        source, tmp_path / "parts" / "vae" / "o", pipeline=tmp_path / "parts", **options
    )
    assert "goes with a file in an original layout only" in refused(
        tmp_path / "parts", out, pipeline=tmp_path / "parts"
    )
    shutil.copy(tmp_path / "Sana" / "checkpoints" / "Sana.pth", tmp_path / "Sana" / "b.pth")
    assert "several files in an original layout" in refused(source, out, **options)


def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, stock):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for source, options, named in [
        (tmp_path / "none", {}, "none: give a pipeline or a transformer folder"),
        (tmp_path / "empty", {}, "neither a pipeline nor a transformer folder"),
        (stock, {"layers": [9]}, "9"),
        (stock, {"layers": [0, 0]}, "different layer indices"),
        (stock, {"layers": "half"}, "'all', 'none' or a list"),
        (stock, {"block_grid": (0, 4)}, "0"),
        (stock, {"block_grid": (2, 2, 2)}, "two positive integers"),
        (stock, {"block_grid": (2.5, 2)}, "two positive integers"),
        (stock, {"block_grid": (1000, 1000)}, "at most 4096 in all"),
        (stock, {"local_conv": 4}, "odd kernel size"),
        (stock, {"layout": "dit"}, "is in Diffusers' layout, not in 'dit'"),
        (
            stock,
            {"config": {"mhla_blocks": 3}},
            "'mhla_blocks', which MHLASanaTransformer2DModel does not know",
        ),
        (stock, {"config": {"mhla_block_grid": [2, 2]}}, "give it with --block-grid"),
        (stock, {"config": tmp_path / "none.json"}, "there is no config file"),
        (stock, {"config": tmp_path / "list.json"}, "holds no JSON object: give arguments of the model"),
        (stock, {"variant": "fp16"}, "no weights of the variant fp16"),
        (stock, {"weights": "ema"}, "is no pickled checkpoint"),
    ]:
        assert named in refused(source, tmp_path / "out", **options)
    assert "hf download somebody/model --local-dir model" in refused("somebody/model", tmp_path / "out")
    (tmp_path / "link").symlink_to("nowhere")
    for there in (stock, tmp_path / "link"):
        with pytest.raises(ValueError, match="exists already"):
            convert_folder(stock, there)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        convert_folder(stock, tmp_path / "file" / "out")
    message = refused(stock, Path("/proc/x"))
    assert message.startswith("cannot write into /proc/x: /proc takes no files") and "GB" not in message


def test_what_a_killed_conversion_left_is_removed_by_the_next_one(tmp_path, stock):
    left = tmp_path / f".out.{2**22 + 1}.part"  # a number above every process's
    left.mkdir()
    (left / "model.safetensors").touch()
    convert_folder(stock, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stock"]


def test_a_config_that_does_not_fit_is_refused(tmp_path, stock):
    out, config = tmp_path / "out", (stock / "config.json").read_text()
    for changes, named in [
        ({"_class_name": "FluxTransformer2DModel"}, "the model is a FluxTransformer2DModel"),
        ({"mhla_layerz": [0]}, "'mhla_layerz', which SanaTransformer2DModel does not know"),
        ({"num_layer": 2}, "did you mean num_layers?"),
        ({"num_layers": 3}, "lacks"),
        ({"num_layers": "2"}, "has num_layers='2': give a positive integer"),
        ({"patch_size": 0}, "has patch_size=0: give a positive integer"),
        ({"num_layers": 1}, "has no place for: transformer_blocks.1"),
        ({"caption_channels": 17}, "the shape (16, 16)"),
        ({"quantization_config": {"load_in_8bit": True}}, "is quantised"),
        ({"_class_name": ["a"]}, "the model is a ['a']"),
        ({"dropout": "x"}, "no MHLASanaTransformer2DModel can be built of this config (TypeError: "),
        ({"num_layers": None}, "transformer_blocks.{2-19}"),  # left out: the class's own number
    ]:
        edit(stock / "config.json", **changes)
        assert named in refused(stock, out)
        (stock / "config.json").write_text(config)
    (stock / "config.json").write_text(config[:-5])
    assert "not valid JSON" in refused(stock, out)


def test_damaged_weights_are_refused_by_name(tmp_path, stock):
    out, weights = tmp_path / "out", sorted(stock.glob("*.safetensors"))[1]
    whole = weights.read_bytes()
    for content in (whole[:-8], b"", whole[:4]):
        weights.write_bytes(content)
        assert weights.name in refused(stock, out)
    (stock / "SHA256SUMS").write_text(f"{hashlib.sha256(whole).hexdigest()}  {weights.name}\n")
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "does not have the sha256" in refused(stock, out)
    weights.write_bytes(whole)
    assert "sha256 on record compared: 1 of" in convert_folder(stock, tmp_path / "good").report()[-1]
    weights.unlink()
    assert "which is missing" in refused(stock, out)
    shutil.rmtree(stock)
    (tmp_path / "a.pt").touch()
    assert "is empty (0 bytes)" in refused(tmp_path / "a.pt", out)


def test_a_command_that_is_told_to_stop_leaves_nothing_behind(tmp_path, stock, monkeypatch):
    def stopped(folder, *_):
        (folder / "half.safetensors").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(conversion, "write_shards", stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(stock), str(tmp_path / "out")])
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_links_without_a_target_or_an_end_are_named(tmp_path):
    tiny_dit.stock_pipeline().save_pretrained(tmp_path / "stock")
    link = tmp_path / "stock" / "vae" / "up"
    link.symlink_to("..")
    assert "up leads to a folder that it is in" in refused(tmp_path / "stock", tmp_path / "out")
    link.unlink()
    link.symlink_to("nowhere")
    message = refused(tmp_path / "stock", tmp_path / "out")
    assert message.startswith(f"cannot copy {link} (") and "No such file" in message
    link.unlink()
    link.symlink_to(tmp_path / "stock" / "scheduler")
    convert_folder(tmp_path / "stock", tmp_path / "out")
    assert (tmp_path / "out" / "vae" / "up" / "scheduler_config.json").is_file()


def test_big_files_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "SHARD_BYTES", 10_000)
    torch.save(original.dit_state(original.stock_dit()), tmp_path / "a.pt")
    convert_folder(tmp_path / "a.pt", tmp_path / "out", config=original.HEADS)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    loaded = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "out")
    assert equal_states(loaded, convert(original.stock_dit()))


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path, stock):
    # The limit stops a file in the middle, as a full disk does.
    code = (
        "import resource, sys\n"
        "from mhla_diffusion.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "sys.exit(main(['convert', sys.argv[1], sys.argv[2]]))\n"
    )
    command = [sys.executable, "-c", code, stock, tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2 and "cannot write" in result.stderr and result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock"]


MEASURE = """
import sys
from pathlib import Path
from mhla_diffusion.pipelines.conversion import convert_folder

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

source, warm, out = sys.argv[1:]
convert_folder(warm, out + "-warm", block_grid=(2, 2))  # imports and caches
before = resident("VmRSS")
convert_folder(source, out, block_grid=(2, 2))
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_no_more_than_two_shards_are_ever_in_memory(tmp_path, stock, suffix):
    model = tiny_sana.stock_transformer(
        num_attention_heads=48, num_cross_attention_heads=48, cross_attention_dim=384, num_layers=24
    )
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="25MB", safe_serialization=suffix == "safetensors")
    shards = [path.stat().st_size for path in source.glob(f"*.{suffix}")]
    del model
    command = [sys.executable, "-c", MEASURE, source, stock, tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert len(shards) >= 5 and int(result.stdout) < 2 * max(shards)
