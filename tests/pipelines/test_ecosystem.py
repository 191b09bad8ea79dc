"""What Diffusers users do with a whole pipeline works alike on SANA and Wan with MHLA, in the stock one and in ours."""

from types import ModuleType
from typing import NamedTuple

import pytest
import tiny_sana_pipeline
import tiny_wan_pipeline
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    SanaPipeline,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    WanPipeline,
)
from model_checks import close

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.models.model_card import IMPORT_LINE
from mhla_diffusion.pipelines.sana import MHLASanaPipeline
from mhla_diffusion.pipelines.wan import MHLAWanPipeline


class Kind(NamedTuple):
    """A pipeline class, with the module that builds it and draws."""

    tiny: ModuleType
    cls: type
    calls: int  # of the transformer in a step: the two captions of guidance together, or one after the other

    def pipeline(self):
        return self.tiny.pipeline(self.cls)

    def draw(self, pipe) -> torch.Tensor:
        return self.tiny.draw(pipe)


KINDS = {
    "SANA, stock": Kind(tiny_sana_pipeline, SanaPipeline, 1),
    "SANA, ours": Kind(tiny_sana_pipeline, MHLASanaPipeline, 1),
    "Wan, stock": Kind(tiny_wan_pipeline, WanPipeline, 2),
    "Wan, ours": Kind(tiny_wan_pipeline, MHLAWanPipeline, 2),
}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
OURS = pytest.mark.parametrize("kind", [KINDS["SANA, ours"], KINDS["Wan, ours"]], ids=["SANA", "Wan"])
CACHES = {
    "first block": lambda _: FirstBlockCacheConfig(threshold=1e9),
    "taylor": lambda _: TaylorSeerCacheConfig(
        disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    ),
    "mag": lambda _: MagCacheConfig(
        threshold=1e9, num_inference_steps=4, retention_ratio=0.1, mag_ratios=[1.0] * 4
    ),
    "sea": lambda _: SeaCacheConfig(
        threshold=1e9, raw_vision_callback=lambda model, args, inputs: list(inputs["hidden_states"])
    ),
    # Wan's pipelines call the model once for each of the two captions, as if there were no guidance.
    "faster": lambda pipe: FasterCacheConfig(
        current_timestep_callback=lambda: pipe.current_timestep, is_guidance_distilled=True
    ),
}


# SANA, whose pipelines give the call no name, takes those that docs/ecosystem.md lists.
SKIPPING = [
    (kind, cache) for kind in KINDS for cache in CACHES if "Wan" in kind or cache not in ("sea", "faster")
]


@pytest.mark.parametrize(("kind", "cache"), SKIPPING)
def test_caches_skip_steps_and_forget_one_picture_before_the_next(kind, cache):
    kind = KINDS[kind]
    pipe = kind.pipeline()
    plain = kind.draw(pipe)
    pipe.transformer.enable_cache(CACHES[cache](pipe))
    read = []
    layers = getattr(pipe.transformer, pipe.transformer._layers_in)
    layers[1].attn1.mixing.register_forward_hook(lambda *_: read.append(1))
    first = kind.draw(pipe)
    assert kind.calls <= len(read) < kind.calls * kind.tiny.CALL["num_inference_steps"]
    assert not close(first, plain)
    assert torch.equal(kind.draw(pipe), first)
    pipe.transformer.disable_cache()
    assert close(kind.draw(pipe), plain)


def broken_off(pipe, step, timestep, tensors):
    if step == 1:
        raise KeyboardInterrupt
    return {}


@OURS
@pytest.mark.parametrize("cache", ["taylor", "mag"])
def test_caches_forget_a_call_that_was_broken_off(kind, cache):
    pipe = kind.pipeline()
    pipe.transformer.enable_cache(CACHES[cache](pipe))
    whole = kind.draw(pipe)
    with pytest.raises(KeyboardInterrupt):
        kind.tiny.draw(pipe, callback_on_step_end=broken_off)
    assert torch.equal(kind.draw(pipe), whole)


@EACH
@pytest.mark.parametrize("whole", [True, False], ids=["the whole pipeline", "the transformer"])
@pytest.mark.parametrize("how", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload(kind, how, whole, tmp_path):
    expected = kind.draw(kind.pipeline())
    pipe = kind.pipeline()
    cpu = torch.device("cpu")
    (pipe if whole else pipe.transformer).enable_group_offload(onload_device=cpu, offload_device=cpu, **how)
    assert close(kind.draw(pipe), expected)
    load_adapter(pipe, kind.tiny.lora(tmp_path, mixing=True))
    with_adapter = kind.draw(pipe)
    plain = kind.pipeline()
    load_adapter(plain, tmp_path)
    assert close(with_adapter, kind.draw(plain)) and not close(with_adapter, expected)


@OURS
def test_fp8_storage_and_fused_projections_in_a_pipeline(kind):
    pipe = kind.pipeline()
    plain = kind.draw(pipe)
    pipe.transformer.fuse_qkv_projections()
    assert close(kind.draw(pipe), plain)
    pipe.transformer.unfuse_qkv_projections()
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert (kind.draw(pipe) - plain).abs().mean() < 0.1


@OURS
def test_a_pushed_pipeline_says_how_it_is_loaded(kind, tmp_path):
    pipe = kind.pipeline()
    pipe.save_pretrained(tmp_path)
    pipe.amend_card(tmp_path, "owner/name")
    card = (tmp_path / "README.md").read_text()
    assert f'{IMPORT_LINE}\n\npipe = mhla_diffusion.load_pipeline("owner/name", hub=True)' in card
    assert type(load_pipeline(tmp_path)) is kind.cls  # a card beside it disturbs nothing
