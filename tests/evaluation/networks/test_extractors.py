"""DINOv2 and CLIP from a folder of weights: tiny random models, computed by hand beside."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

from mhla_diffusion.evaluation.metrics.accumulators import ClipDiscrepancy
from mhla_diffusion.evaluation.networks.extractors import random_network, transformers_vision
from mhla_diffusion.evaluation.networks.preparation import pil_bicubic

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}


def pictures() -> torch.Tensor:
    return torch.randint(
        0, 256, (3, 3, 20, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def test_dinov2s_class_token(tmp_path):
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(**SIZES, image_size=28, patch_size=14)).eval()
    model.save_pretrained(tmp_path)
    extractor = transformers_vision("dinov2", tmp_path, device="cpu")
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    prepared = (pil_bicubic(pictures(), 224) / 255 - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        expected = model(prepared).last_hidden_state[:, 0]
    torch.testing.assert_close(extractor(pictures())["pool"], expected, rtol=1e-4, atol=1e-5)
    assert extractor.taps == {"pool": 12} and len(extractor.about["weights"]["sha256"]) == 64


def test_clips_projected_embedding_feeds_cmmd(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = CLIPVisionConfig(**SIZES, intermediate_size=24, projection_dim=7, image_size=32, patch_size=16)
    model = CLIPVisionModelWithProjection(config).eval()
    model.save_pretrained(tmp_path / "clip-image")
    monkeypatch.setenv("MHLA_WEIGHTS", str(tmp_path))
    extractor = transformers_vision("clip-image", device="cpu")
    found = extractor(pictures())["pool"]
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    with torch.no_grad():
        expected = model((pil_bicubic(pictures(), 32) / 255 - mean) / std).image_embeds
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    metric = ClipDiscrepancy(extractor)
    metric.update(pictures(), real=True)
    metric.update(pictures().flip(0), real=False)
    assert abs(metric.compute()) < 1e-6
    with pytest.raises(ValueError, match="holds a clip_vision_model, not dinov2"):
        transformers_vision("dinov2", tmp_path / "clip-image")


def test_weights_that_are_missing_are_not_drawn_at_random(tmp_path):
    Dinov2Model(Dinov2Config(**SIZES, image_size=28, patch_size=14)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    cut = state.pop("encoder.layer.1.mlp.fc1.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights, the first is encoder.layer.1.mlp.fc1.weight"):
        transformers_vision("dinov2", tmp_path)
    state["encoder.layer.1.mlp.fc1.weight"] = cut[1:]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds no model that can be used"):
        transformers_vision("dinov2", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="holds no model that can be used") as error:
        transformers_vision("dinov2", tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no model that can be used"):
        transformers_vision("dinov2", tmp_path)


def test_random_networks_are_fixed_by_their_seed():
    torch.manual_seed(1)
    first = random_network(8, seed=3, device="cpu")(pictures())["pool"]
    torch.manual_seed(2)
    assert torch.equal(random_network(8, seed=3, device="cpu")(pictures())["pool"], first)
    assert not torch.equal(random_network(8, seed=4, device="cpu")(pictures())["pool"], first)
    assert "not FID" in random_network(8, device="cpu").about["protocol"]
