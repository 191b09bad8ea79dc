"""Diffusers' tests of its DiT transformer, run on ours, and those of what stock DiT lacks: LoRA, caches, offload."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    LoraTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
    TorchCompileTesterMixin,
)
from tests.models.transformers import test_models_dit_transformer2d as upstream

from mhla_diffusion.models.dit import MHLADiTTransformer2DModel

OPTIONS = {
    "num_layers": 2,
    "mhla_block_grid": (2, 2),
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
}


class OnOurs:
    """Comes first among the bases: our class, with everything that it can have."""

    @property
    def model_class(self):
        return MHLADiTTransformer2DModel

    def get_init_dict(self) -> dict:
        return super().get_init_dict() | OPTIONS


class TestModel(OnOurs, upstream.DiTTransformer2DTesterConfig, upstream.ModelTesterMixin):
    pass


class TestMemory(OnOurs, upstream.TestDiTTransformer2DMemory):
    pass


class TestTraining(OnOurs, upstream.TestDiTTransformer2DTraining):
    def test_gradient_checkpointing_is_applied(self):
        super(upstream.TestDiTTransformer2DTraining, self).test_gradient_checkpointing_is_applied(
            expected_set={"MHLADiTTransformer2DModel"}
        )


class TestAttention(OnOurs, upstream.TestDiTTransformer2DAttention):
    def test_attention_processor_dict(self):
        # Upstream puts softmax processors everywhere, which would quietly undo MHLA: ours says no.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="restore"):
            ours.set_attn_processor({name: AttnProcessor() for name in ours.attn_processors})


class TestLoRA(OnOurs, upstream.DiTTransformer2DTesterConfig, LoraTesterMixin):
    def test_logs_info_when_no_lora_keys_found(self):
        # Upstream wants a log line; ours refuses a LoRA of which nothing would be used.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="have no place"):
            ours.load_lora_adapter({"lora_foo": torch.tensor(2.0)}, prefix="transformer")

    def test_lora_missing_keys_warning(self, tmp_path):
        with pytest.raises(
            ValueError, match="its other half is missing"
        ):  # where Diffusers draws it at random
            super().test_lora_missing_keys_warning(tmp_path)


class TestCompile(OnOurs, upstream.DiTTransformer2DTesterConfig, TorchCompileTesterMixin):
    pass


class TestFirstBlockCache(OnOurs, upstream.DiTTransformer2DTesterConfig, FirstBlockCacheTesterMixin):
    pass


class TestMagCache(OnOurs, upstream.DiTTransformer2DTesterConfig, MagCacheTesterMixin):
    pass


class TestTaylorSeerCache(OnOurs, upstream.DiTTransformer2DTesterConfig, TaylorSeerCacheTesterMixin):
    pass


class TestPyramidAttentionBroadcast(
    OnOurs, upstream.DiTTransformer2DTesterConfig, PyramidAttentionBroadcastTesterMixin
):
    pass
