"""Which backend is taken, and that the package works without a GPU, Triton or Diffusers."""

import os
import subprocess
import sys

import pytest
import torch

from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import backends, explain, mhla_attention
from mhla_diffusion.ops.backends import is_plain_call


def test_explain_names_the_backend_and_the_reason(device):
    here = explain(torch.zeros(1, 4, 1, 8, device=device))
    assert here.startswith("triton: " if device.type == "cuda" else "eager: ") and str(device) in here
    assert explain("cpu", backend="reference") == "reference: asked for"
    assert "limit of 256" in explain("cuda", head_dim=300)


def test_explain_tells_why_triton_is_not_taken(monkeypatch):
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    assert explain("cpu") == "eager: Triton kernels need a CUDA device, q is on cpu"
    assert "float32, bfloat16 and float16" in explain("cuda", dtype=torch.float64)
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert explain("cuda") == "eager: Triton is not installed"
    with pytest.raises(ValueError, match="choose one of"):
        explain("cpu", backend="flash")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_interpreter_is_trusted_with_float32_only(monkeypatch, dtype):
    monkeypatch.setattr(backends, "_INTERPRETED", True)
    q = torch.ones(1, 4, 1, 8, dtype=dtype)
    arguments = (q, q, q, initial_mixing((2,)))
    with pytest.raises(ValueError, match="float32 only; use backend='auto'") as error:
        mhla_attention(*arguments, grid=(4,), block_grid=(2,), backend="triton")
    assert "\n" not in str(error.value)
    out = mhla_attention(*arguments, grid=(4,), block_grid=(2,))
    assert out.dtype == dtype and torch.allclose(out, torch.ones_like(out))


def test_triton_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    q = torch.ones(1, 4, 1, 8)
    with pytest.raises(ValueError, match="need a CUDA device, q is on cpu; use backend='auto' or 'eager'"):
        mhla_attention(q, q, q, initial_mixing((2,)), grid=(4,), block_grid=(2,), backend="triton")


def test_head_dims_beyond_the_kernels_run_in_plain_torch():
    q = torch.ones(1, 4, 1, 264)
    assert mhla_attention(q, q, q, initial_mixing((2,)), grid=(4,), block_grid=(2,)).shape == q.shape
    with pytest.raises(ValueError, match="head dim 264 is above the kernels' limit of 256"):
        mhla_attention(q, q, q, initial_mixing((2,)), grid=(4,), block_grid=(2,), backend="triton")


PROGRAM = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import torch
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import explain, mhla_attention
q = torch.ones(1, 6, 1, 8)
assert (mhla_attention(q, q, q, initial_mixing((2,)), grid=(6,), block_grid=(2,)) - 1).abs().max() < 1e-6
assert explain(q).startswith("eager: "), explain(q)
assert not {blocked} & set(sys.modules)
"""


def test_operators_need_neither_diffusers_nor_triton():
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    program = PROGRAM.format(blocked={"diffusers", "transformers", "accelerate", "triton"})
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **hidden}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class Wrapped(torch.Tensor):
    """As quantised weights are."""


def test_a_kernel_without_gradients_takes_calls_that_want_nothing_else():
    x, weight, bias = torch.randn(2, 3), torch.nn.Parameter(torch.randn(4, 3)), torch.randn(4)
    with torch.no_grad():
        assert is_plain_call(x, weight, bias) and is_plain_call(x, weight, None)
    with torch.inference_mode():
        assert is_plain_call(x, weight)
    assert is_plain_call(x, weight.detach(), bias)
    assert not is_plain_call(x, weight, bias)  # a gradient
    assert not is_plain_call(x.requires_grad_(), weight.detach())
    x = x.detach()
    with torch.no_grad():
        assert not is_plain_call(x, weight.bfloat16()) and not is_plain_call(x, weight, bias.double())
        assert not is_plain_call(x, weight.to("meta"))
        assert not is_plain_call(x, weight.data.as_subclass(Wrapped))
        assert not is_plain_call(x, torch.nn.Parameter(weight.data.as_subclass(Wrapped)))
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_plain_call(x, weight, bias)

        def tangent_of(x):
            assert not is_plain_call(x, weight, bias)
            return x

        torch.func.jvp(tangent_of, (x,), (x,))


def test_the_question_breaks_no_graph():
    def choose(x, weight):
        return x + 1 if is_plain_call(x, weight) else x

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    x, weight = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    assert compiled(x, weight).sum() == 0
    with torch.no_grad():
        assert compiled(x, weight).sum() == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(x, weight).sum() == 0
