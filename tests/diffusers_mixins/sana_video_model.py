"""Diffusers' own tests of its SANA-Video transformer, run on ours with a hybrid; see `sana_model.py` for how."""

import pytest
import torch
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    LoraTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
    TorchCompileTesterMixin,
)
from tests.models.transformers import test_models_transformer_sana_video as upstream

from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel

OPTIONS = {
    "mhla_layers": [1],
    "mhla_block_grid": (2, 3, 3),
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
}
Config = upstream.SanaVideoTransformer3DTesterConfig


class OnOurs:
    """Comes first among the bases: our class, with everything that it can have."""

    @property
    def model_class(self):
        return MHLASanaVideoTransformer3DModel

    def get_init_dict(self) -> dict:
        return super().get_init_dict() | OPTIONS


class TestModel(OnOurs, upstream.TestSanaVideoTransformer3D):
    pass


class TestMemory(OnOurs, upstream.TestSanaVideoTransformer3DMemory):
    pass


class TestTraining(OnOurs, upstream.TestSanaVideoTransformer3DTraining):
    def test_gradient_checkpointing_is_applied(self):
        super(upstream.TestSanaVideoTransformer3DTraining, self).test_gradient_checkpointing_is_applied(
            expected_set={"MHLASanaVideoTransformer3DModel"}
        )


class TestAttention(OnOurs, upstream.TestSanaVideoTransformer3DAttention):
    def test_attention_processor_dict(self):
        # Upstream puts other processors everywhere, which would quietly undo MHLA: ours says no.
        ours = self.model_class(**self.get_init_dict())
        with pytest.raises(ValueError, match="restore"):
            ours.set_attn_processor({name: SanaLinearAttnProcessor3_0() for name in ours.attn_processors})


class TestLoRA(OnOurs, Config, LoraTesterMixin):
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


class TestCompile(OnOurs, Config, TorchCompileTesterMixin):
    pass


class TestFirstBlockCache(OnOurs, Config, FirstBlockCacheTesterMixin):
    pass


class TestMagCache(OnOurs, Config, MagCacheTesterMixin):
    pass


class TestTaylorSeerCache(OnOurs, Config, TaylorSeerCacheTesterMixin):
    pass


class TestPyramidAttentionBroadcast(OnOurs, Config, PyramidAttentionBroadcastTesterMixin):
    pass
