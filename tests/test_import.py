"""Importing the package: cheap, and without what the machine may lack."""

import os
import subprocess
import sys

import pytest

import mhla_diffusion


def run_python(code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_public_name_can_be_had_from_the_root():
    assert {"mhla_attention", "block_table", "convert", "restore", "load_pipeline"} <= set(
        mhla_diffusion.__all__
    )
    for name in mhla_diffusion.__all__:
        assert getattr(mhla_diffusion, name) is not None
        assert name in dir(mhla_diffusion)
    assert mhla_diffusion.__version__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'mhla_atention'"):
        _ = mhla_diffusion.mhla_atention


def test_importing_the_root_and_missing_a_pipeline_need_neither_torch_nor_diffusers(tmp_path):
    """This makes both take a fraction of a second; a clock in a test would measure the machine's load."""
    code = (
        "import sys, mhla_diffusion\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'triton', 'numpy'}\n"
        "print(heavy & set(sys.modules))\n"
        "try:\n"
        "    mhla_diffusion.load_pipeline('nowhere')\n"
        "except ValueError as error:\n"
        "    print(str(error).count('\\n'), heavy & set(sys.modules))\n"
    )
    assert run_python(code, MHLA_WEIGHTS=str(tmp_path)).splitlines() == ["set()", "0 set()"]


def test_the_models_work_without_triton_and_touch_no_network():
    code = (
        "import socket, sys\n"
        "sys.modules['triton'] = None\n"
        "def refuse(*args, **kwargs):\n"
        "    raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "socket.create_connection = refuse\n"
        "socket.getaddrinfo = refuse\n"
        "import torch\n"
        "from mhla_diffusion.attention import MHLASanaAttention\n"
        "from mhla_diffusion import MHLASanaPipeline, MHLASanaTransformer2DModel\n"
        "attention = MHLASanaAttention(8, 2, 4, block_grid=(2, 2))\n"
        "print(tuple(attention(torch.randn(1, 9, 8), grid=(3, 3)).shape))\n"
    )
    assert run_python(code) == "(1, 9, 8)"


REGISTERED = (
    "from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES\n"
    "print(LOADABLE_CLASSES['mhla_diffusion'])\n"
    "print(sum('RegisterOnImport' in type(finder).__name__ for finder in sys.meta_path))\n"
)


@pytest.mark.parametrize(
    "first",
    [
        "import sys, mhla_diffusion; from diffusers import DiffusionPipeline",
        "import sys; from diffusers import DiffusionPipeline; import mhla_diffusion",
    ],
)
def test_diffusers_knows_the_package_whichever_is_imported_first(first):
    lines = run_python(f"{first}\n{REGISTERED}").splitlines()
    assert lines == ["{'ModelMixin': ['save_pretrained', 'from_pretrained']}", "0"]


def test_diffusers_finds_its_base_class_inside_the_package():
    from diffusers import ModelMixin

    assert mhla_diffusion.ModelMixin is ModelMixin
    assert issubclass(mhla_diffusion.MHLASanaTransformer2DModel, ModelMixin)
