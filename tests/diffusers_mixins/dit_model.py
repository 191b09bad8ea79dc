"""Diffusers' tests of its DiT transformer, run on ours, and those of what stock DiT lacks: LoRA, caches, offload."""

import upstream_model_tests
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
from upstream_model_tests import CheckpointingOfOurs, NoForeignProcessors, NoUnusedLoRA

from mhla_diffusion.models.dit import MHLADiTTransformer2DModel

Config = upstream.DiTTransformer2DTesterConfig


class OnOurs(upstream_model_tests.OnOurs):
    ours = MHLADiTTransformer2DModel
    foreign = AttnProcessor
    options = {
        "num_layers": 2,
        "mhla_block_grid": (2, 2),
        "mhla_gate": True,
        "mhla_local_conv": 3,
        "mhla_norm_out": True,
    }


class TestModel(OnOurs, Config, upstream.ModelTesterMixin):
    pass


class TestMemory(OnOurs, upstream.TestDiTTransformer2DMemory):
    pass


class TestTraining(OnOurs, CheckpointingOfOurs, upstream.TestDiTTransformer2DTraining):
    pass


class TestAttention(OnOurs, NoForeignProcessors, upstream.TestDiTTransformer2DAttention):
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
