"""Diffusers' tests of its Wan transformer, run on ours with a hybrid of MHLA and softmax layers."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
)
from tests.models.transformers import test_models_transformer_wan as upstream

from mhla_diffusion.models.wan import MHLAWanTransformer3DModel

OPTIONS = {
    "mhla_layers": [1],
    "mhla_block_grid": (2, 3, 3),
    "mhla_gate": True,
    "mhla_local_conv": 3,
}


class OnOurs:
    """Comes first among the bases: our class, with everything that it can have."""

    @property
    def model_class(self):
        return MHLAWanTransformer3DModel

    def get_init_dict(self) -> dict:
        return super().get_init_dict() | OPTIONS


class TestModel(OnOurs, upstream.TestWanTransformer3D):
    pass


class TestMemory(OnOurs, upstream.TestWanTransformer3DMemory):
    pass


class TestTraining(OnOurs, upstream.TestWanTransformer3DTraining):
    def test_gradient_checkpointing_is_applied(self):
        super(upstream.TestWanTransformer3DTraining, self).test_gradient_checkpointing_is_applied(
            expected_set={"MHLAWanTransformer3DModel"}
        )


class TestAttention(OnOurs, upstream.TestWanTransformer3DAttention):
    def test_attention_processor_dict(self):
        # Upstream puts softmax processors everywhere, which would quietly undo MHLA: ours says no.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="restore"):
            ours.set_attn_processor({name: WanAttnProcessor() for name in ours.attn_processors})


class TestLoRA(OnOurs, upstream.TestWanTransformer3DLoRA):
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


class TestCompile(OnOurs, upstream.TestWanTransformer3DCompile):
    pass


class TestFirstBlockCache(OnOurs, upstream.WanTransformer3DTesterConfig, FirstBlockCacheTesterMixin):
    pass


class TestMagCache(OnOurs, upstream.WanTransformer3DTesterConfig, MagCacheTesterMixin):
    pass


class TestTaylorSeerCache(OnOurs, upstream.WanTransformer3DTesterConfig, TaylorSeerCacheTesterMixin):
    pass


class TestPyramidAttentionBroadcast(
    OnOurs, upstream.WanTransformer3DTesterConfig, PyramidAttentionBroadcastTesterMixin
):
    pass
