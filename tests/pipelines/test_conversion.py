import json
import shutil

import pytest
import tiny_sana
import torch
from diffusers import DiffusionPipeline

from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.conversion import convert_folder


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


def test_a_transformer_folder_keeps_its_dtype_and_the_layers_chosen(tmp_path):
    tiny_sana.stock_transformer().to(torch.bfloat16).save_pretrained(tmp_path / "stock")
    convert_folder(tmp_path / "stock", tmp_path / "mhla", block_grid=(2, 2), layers=[1])
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path / "mhla", dtype=torch.bfloat16)
    assert loaded.config.mhla_layers == [1]
    stored = json.loads((tmp_path / "mhla" / "config.json").read_text())
    assert stored["_class_name"] == "MHLASanaTransformer2DModel"
    weights = next((tmp_path / "mhla").glob("*.safetensors")).stat().st_size
    assert weights < 1.1 * next((tmp_path / "stock").glob("*.safetensors")).stat().st_size


def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path):
    stock = tmp_path / "stock"
    tiny_sana.stock_transformer().save_pretrained(stock)
    before = sorted(tmp_path.iterdir())
    for source, options, named in [
        (tmp_path / "none", {}, "neither a pipeline nor a transformer folder"),
        (stock, {"layers": [9]}, "9"),
        (stock, {"block_grid": (0, 4)}, "0"),
    ]:
        with pytest.raises(ValueError, match=named) as error:
            convert_folder(source, tmp_path / "out", **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="exists already"):
        convert_folder(stock, stock)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        convert_folder(stock, tmp_path / "file" / "out")
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.iterdir()) == before

    other = tmp_path / "other"
    shutil.copytree(stock, other)
    config = json.loads((other / "config.json").read_text()) | {"_class_name": "WanTransformer3DModel"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the model is a WanTransformer3DModel"):
        convert_folder(other, tmp_path / "out")
    weights = next(stock.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="cut short"):
        convert_folder(stock, tmp_path / "out")
    assert not (tmp_path / "out").exists()
