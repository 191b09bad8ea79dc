"""MHLASanaTransformer2DModel: stock where MHLA is off, a good Diffusers model where it is on."""

from pathlib import Path

import pytest
import torch
from diffusers import FirstBlockCacheConfig, SanaTransformer2DModel
from model_checks import relative, same_weights, stirred
from safetensors.torch import load_file, save_file
from tiny_sana import EVERYTHING, model, run, stock_transformer, transformer_inputs

from mhla_diffusion.attention import MHLASanaAttention
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"patch_size": 2, "qk_norm": "rms_norm_across_heads"}])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(changes):
    stock, ours = stock_transformer(**changes), model(mhla_layers=[], **changes)
    assert same_weights(stock, ours)
    assert torch.equal(run(stock), run(ours))


@torch.no_grad()
def test_any_picture_size_works_with_one_set_of_weights():
    ours = stirred(model(mhla_block_grid=(4, 4), mhla_local_conv=3))
    for grid in ((8, 8), (7, 5), (4, 9), (16, 4)):
        inputs = transformer_inputs(batch=3, size=grid)
        out = run(ours, **inputs)
        assert out.shape == (3, 4, *grid) and out.isfinite().all()
        alone = run(ours, **{name: value[1:2] for name, value in inputs.items()})
        assert relative(out[1:2], alone) < 1e-5
    with pytest.warns(UserWarning, match="interpolated"):
        assert run(ours, **transformer_inputs(size=(2, 8))).isfinite().all()


def test_a_checkpoint_without_the_shared_weights_is_refused(tmp_path):
    stock_transformer(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks .* of the model's weights") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path, num_layers=2)
    assert "\n" not in str(caught.value)


def test_shards_that_do_not_hold_what_their_index_says_are_refused(tmp_path):
    model().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    lost = len(load_file(shard))
    for content, message in (
        (lambda: save_file({}, shard), f"lacks {lost} of the model's weights"),
        (lambda: shard.write_bytes(b""), f"{shard.name} is cut short or no safetensors file .0 bytes"),
        (shard.unlink, f"names {shard.name}, which is missing"),
        (lambda: index_of(tmp_path).write_text('{"weight_map": 3}'), "has no weight_map"),
    ):
        content()
        with pytest.raises(ValueError, match=message) as caught:
            MHLASanaTransformer2DModel.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)


def index_of(folder: Path) -> Path:
    return next(folder.glob("*.index.json"))


@torch.no_grad()
@pytest.mark.parametrize("given", [{"num_layers": 1}, {"mhla_gate": False}, {"mhla_layers": []}])
def test_weights_without_a_place_are_refused_not_dropped(tmp_path, given):
    model(**EVERYTHING).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no place for") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path, **given)
    assert "\n" not in str(caught.value)


def test_a_matrix_shared_by_two_layers_can_be_saved(tmp_path):
    ours = stirred(model())
    ours.transformer_blocks[1].attn1.mixing = ours.transformer_blocks[0].attn1.mixing
    ours.save_pretrained(tmp_path)
    shared = ours.transformer_blocks[0].attn1.mixing
    assert ours.transformer_blocks[1].attn1.mixing is shared  # saving unshares the file, not the model
    again = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(again.transformer_blocks[1].attn1.mixing.weight, shared.weight)
    with torch.no_grad():
        assert relative(run(again), run(ours)) < 1e-6


@torch.no_grad()
def test_the_first_block_cache_works():
    ours = model(num_layers=3)
    ours.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    cached = model(num_layers=3)
    with ours.cache_context("cond"):
        assert relative(run(ours), run(cached)) < 1e-6


def test_a_backend_can_be_chosen():
    ours = stirred(model())
    with torch.no_grad():
        expected = run(ours)
        ours.set_mhla_backend("reference")
        assert all(block.attn1.backend == "reference" for block in ours.transformer_blocks)
        assert relative(run(ours), expected) < 1e-5
    with pytest.raises(ValueError, match="backend='cuda': choose one of auto, triton, eager, reference"):
        ours.set_mhla_backend("cuda")
    assert all(block.attn1.backend == "reference" for block in ours.transformer_blocks)


def test_a_folder_that_has_a_variant_alone_says_which(tmp_path):
    model().save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(OSError, match="weights of the variant fp16 only, give variant='fp16'") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert MHLASanaTransformer2DModel.from_pretrained(tmp_path, variant="fp16")


def test_a_token_mask_is_refused():
    inputs = transformer_inputs()
    with pytest.raises(ValueError, match="attention_mask"):
        model()(**inputs, attention_mask=torch.ones(2, 64))


def test_latents_that_do_not_divide_into_patches_are_refused():
    with pytest.raises(ValueError, match="7x8 do not divide into patches of 2x2"):
        run(model(patch_size=2), **transformer_inputs(size=(7, 8)))


def test_the_stock_class_reports_what_it_cannot_use(tmp_path, caplog):
    """Diffusers gives no way to make this an error; `load_pipeline` is what catches it for a pipeline."""
    model().save_pretrained(tmp_path)
    from diffusers.utils import logging

    logging.enable_propagation()
    try:
        _, info = SanaTransformer2DModel.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        logging.disable_propagation()
    assert any("mixing" in key for key in info["unexpected_keys"])
    assert "mhla_block_grid" in caplog.text and "were not used" in caplog.text


def test_isinstance_of_the_parts():
    ours = model()
    assert isinstance(ours, SanaTransformer2DModel)
    assert all(isinstance(block.attn1, MHLASanaAttention) for block in ours.transformer_blocks)
