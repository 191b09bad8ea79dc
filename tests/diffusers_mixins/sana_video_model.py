"""Diffusers' own tests of its SANA-Video transformer, run on ours with a hybrid; see `sana_model.py` for how."""

import upstream_model_tests
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
from upstream_model_tests import CheckpointingOfOurs, NoForeignProcessors, NoUnusedLoRA

from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel

Config = upstream.SanaVideoTransformer3DTesterConfig


class OnOurs(upstream_model_tests.OnOurs):
    ours = MHLASanaVideoTransformer3DModel
    foreign = SanaLinearAttnProcessor3_0
    options = {
        "mhla_layers": [1],
        "mhla_block_grid": (2, 3, 3),
        "mhla_gate": True,
        "mhla_local_conv": 3,
        "mhla_norm_out": True,
    }


class TestModel(OnOurs, upstream.TestSanaVideoTransformer3D):
    pass


class TestMemory(OnOurs, upstream.TestSanaVideoTransformer3DMemory):
    pass


class TestTraining(OnOurs, CheckpointingOfOurs, upstream.TestSanaVideoTransformer3DTraining):
    pass


class TestAttention(OnOurs, NoForeignProcessors, upstream.TestSanaVideoTransformer3DAttention):
    pass


class TestLoRA(OnOurs, NoUnusedLoRA, Config, LoraTesterMixin):
    pass


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
