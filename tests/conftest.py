"""Settings every test shares, made before anything imports torch, Triton or a Hugging Face library."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network fails at once instead of waiting
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forked workers would print a warning each
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite runs in parallel processes, one per core

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when it is imported; torch imports it lazily, so this is early enough.
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

from hypothesis import settings

# A deadline would make a busy machine fail a right property; the derandomised search makes a failure repeat.
settings.register_profile("default", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def attention_backend_of_the_process():
    """`set_attention_backend` of one model also changes what Diffusers takes for every other: put back after a test."""
    name = "diffusers.models.attention_dispatch"
    module = sys.modules.get(name)
    before = None if module is None else module._AttentionBackendRegistry.get_active_backend()[0]
    yield
    if module := sys.modules.get(name):  # a test may have been the first to import it
        start = module.AttentionBackendName(module.DIFFUSERS_ATTN_BACKEND)
        module._AttentionBackendRegistry.set_active_backend(before or start)


def pytest_collection_modifyitems(config, items):
    """Leave the tests marked `gpu`, or `gpu(2)`, out, instead of skipping them, where there are not as many GPUs."""
    gpus = torch.cuda.device_count() if HAS_CUDA else 0
    marks = [(item, item.get_closest_marker("gpu")) for item in items]
    left_out = [item for item, mark in marks if mark and gpus < (mark.args[0] if mark.args else 1)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_report_header(config):
    """What the kernels ran on; eval/gpu_tests.py reads it from a kept log."""
    from mhla_diffusion.provenance import versions

    gpus = torch.cuda.device_count() if HAS_CUDA else 0
    device = torch.cuda.get_device_name() if gpus else "cpu"
    parts = versions(("torch", "triton", "diffusers", "transformers"))
    return f"device: {device} x {gpus}; " + ", ".join(f"{name} {version}" for name, version in parts.items())
