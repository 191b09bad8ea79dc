"""`mhla convert` of a Wan 2.2 with two experts: both are converted, from either layout."""

import json

import pytest
import torch
from model_checks import relative
from original_wan import stock_wan, wan_state
from safetensors.torch import save_file
from tiny_wan import run

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.pipelines.conversion import convert_folder


@pytest.fixture
def experts():
    return {"transformer": stock_wan(1), "transformer_2": stock_wan(2)}


def check(folder, experts):
    for name, stock in experts.items():
        ours = MHLAWanTransformer3DModel.from_pretrained(folder / name)
        assert ours.config.mhla_layers == [1] and ours.config.mhla_block_grid == [2, 2, 3]
        theirs = stock.state_dict()
        assert all(torch.equal(ours.state_dict()[key], x) for key, x in theirs.items())
        assert run(ours).isfinite().all()
    assert relative(theirs["proj_out.weight"], experts["transformer"].proj_out.weight) > 1e-3


@torch.no_grad()
def test_a_pipeline_with_two_experts(tmp_path, experts):
    source = tmp_path / "pipe"
    for name, stock in experts.items():
        stock.save_pretrained(source / name)
    index = {name: ["diffusers", "WanTransformer3DModel"] for name in experts}
    index |= {"_class_name": "WanPipeline", "boundary_ratio": 0.875, "vae": [None, None]}
    (source / "model_index.json").write_text(json.dumps(index))
    done = convert_folder(source, tmp_path / "out", block_grid=(2, 2, 3), layers="1/2")
    check(tmp_path / "out", experts)
    written = json.loads((tmp_path / "out" / "model_index.json").read_text())
    ours = ["mhla_diffusion", "MHLAWanTransformer3DModel"]
    assert written == index | {"transformer": ours, "transformer_2": ours}
    assert {line.partition(":")[0] for line in done.report()} == {"transformer", "transformer_2"}
    assert len(done.key_map()) == 2 * len(done.plan.key_map())


@torch.no_grad()
def test_an_original_folder_with_two_experts(tmp_path, experts):
    source = tmp_path / "Wan2.2-T2V-A14B"
    for stock, folder in zip(experts.values(), ("high_noise_model", "low_noise_model"), strict=True):
        (source / folder).mkdir(parents=True)
        save_file(wan_state(stock), source / folder / "diffusion_pytorch_model.safetensors")
        config = {"_class_name": "WanModel", "dim": 24, "num_heads": 2, "eps": 1e-6}
        (source / folder / "config.json").write_text(json.dumps(config))
    torch.save({"shared.weight": torch.ones(2, 2)}, source / "models_t5_umt5-xxl-enc-bf16.pth")
    with pytest.raises(ValueError, match=f"original layout.*mhla convert {source} "):
        load_pipeline(source)
    convert_folder(source, tmp_path / "out", block_grid=(2, 2, 3), layers="1/2")
    check(tmp_path / "out", experts)
