"""Diffusers' tests of its Wan transformer, run on ours with a hybrid of MHLA and softmax layers."""

import upstream_model_tests
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
)
from tests.models.transformers import test_models_transformer_wan as upstream
from upstream_model_tests import CheckpointingOfOurs, NoForeignProcessors, NoUnusedLoRA

from mhla_diffusion.models.wan import MHLAWanTransformer3DModel

Config = upstream.WanTransformer3DTesterConfig


class OnOurs(upstream_model_tests.OnOurs):
    ours = MHLAWanTransformer3DModel
    foreign = WanAttnProcessor
    options = {
        "mhla_layers": [1],
        "mhla_block_grid": (2, 3, 3),
        "mhla_gate": True,
        "mhla_local_conv": 3,
    }


class TestModel(OnOurs, upstream.TestWanTransformer3D):
    pass


class TestMemory(OnOurs, upstream.TestWanTransformer3DMemory):
    pass


class TestTraining(OnOurs, CheckpointingOfOurs, upstream.TestWanTransformer3DTraining):
    pass


class TestAttention(OnOurs, NoForeignProcessors, upstream.TestWanTransformer3DAttention):
    pass


class TestLoRA(OnOurs, NoUnusedLoRA, upstream.TestWanTransformer3DLoRA):
    pass


class TestCompile(OnOurs, upstream.TestWanTransformer3DCompile):
    pass


class TestFirstBlockCache(OnOurs, Config, FirstBlockCacheTesterMixin):
    pass


class TestMagCache(OnOurs, Config, MagCacheTesterMixin):
    pass


class TestTaylorSeerCache(OnOurs, Config, TaylorSeerCacheTesterMixin):
    pass


class TestPyramidAttentionBroadcast(OnOurs, Config, PyramidAttentionBroadcastTesterMixin):
    pass
