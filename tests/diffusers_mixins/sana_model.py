"""Diffusers' own tests of its SANA transformer, run on ours; `make test-diffusers DIFFUSERS_SRC=...`.

Its wheel holds no tests: they are taken from a checkout, whose root is on `PYTHONPATH`. The names of the files here
keep them out of the ordinary run.
"""

import upstream_model_tests
from diffusers.models.attention_processor import AttnProcessor
from tests.models.testing_utils import (
    FirstBlockCacheTesterMixin,
    MagCacheTesterMixin,
    PyramidAttentionBroadcastTesterMixin,
    TaylorSeerCacheTesterMixin,
    TorchCompileTesterMixin,
)
from tests.models.transformers import test_models_transformer_sana as upstream
from upstream_model_tests import CheckpointingOfOurs, NoForeignProcessors, NoUnusedLoRA

from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

Config = upstream.SanaTransformerTesterConfig


class OnOurs(upstream_model_tests.OnOurs):
    ours = MHLASanaTransformer2DModel
    foreign = AttnProcessor
    options = {
        "num_layers": 2,
        "mhla_block_grid": (3, 2),
        "mhla_gate": True,
        "mhla_local_conv": 3,
        "mhla_norm_out": True,
    }


class TestModel(OnOurs, upstream.TestSanaTransformer):
    pass


class TestMemory(OnOurs, upstream.TestSanaTransformerMemory):
    pass


class TestTraining(OnOurs, CheckpointingOfOurs, upstream.TestSanaTransformerTraining):
    pass


class TestAttention(OnOurs, NoForeignProcessors, upstream.TestSanaTransformerAttention):
    pass


class TestLoRA(OnOurs, NoUnusedLoRA, upstream.TestSanaTransformerLoRA):
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
