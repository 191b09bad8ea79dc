"""Diffusion transformers with multi-head linear attention over token blocks, as Diffusers pipelines.

Importing this package is cheap: every public name is imported from its module when it is first used, so
nothing here needs Diffusers, Triton, a GPU or a network. `import mhla_diffusion` also lets Diffusers' own
`DiffusionPipeline.from_pretrained` load pipelines whose `model_index.json` names our models.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys

_HOME_OF = {
    "MHLADiTPipeline": "mhla_diffusion.pipelines.dit",
    "MHLADiTTransformer2DModel": "mhla_diffusion.models.dit",
    "MHLASanaAttention": "mhla_diffusion.attention",
    "MHLASanaPipeline": "mhla_diffusion.pipelines.sana",
    "MHLASanaTransformer2DModel": "mhla_diffusion.models.sana",
    "MHLASanaVideoAttention": "mhla_diffusion.sana_video_attention",
    "MHLASanaVideoTransformer3DModel": "mhla_diffusion.models.sana_video",
    "MHLAWanAttention": "mhla_diffusion.wan_attention",
    "MHLAWanPipeline": "mhla_diffusion.pipelines.wan",
    "MHLAWanTransformer3DModel": "mhla_diffusion.models.wan",
    # Diffusers looks its base class up *inside* the library that a model_index.json names.
    "ModelMixin": "diffusers",
    "block_table": "mhla_diffusion.blocks",
    "convert": "mhla_diffusion.models.convert",
    "load_pipeline": "mhla_diffusion.loading",
    "mhla_attention": "mhla_diffusion.ops",
    "restore": "mhla_diffusion.models.convert",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name == "__version__":
        value = importlib.metadata.version(__name__)
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # asked for once only
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_DIFFUSERS_LOADER = "diffusers.pipelines.pipeline_loading_utils"


def _register_with_diffusers(loader) -> None:
    """Make `["mhla_diffusion", "MHLA..."]` a component that Diffusers loads, saves and downloads."""
    loader.LOADABLE_CLASSES[__name__] = {"ModelMixin": ["save_pretrained", "from_pretrained"]}


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Registers this package at the moment when Diffusers' loader is imported, and does nothing else.

    Importing Diffusers here instead would cost two seconds at each start of a program, and would tie the
    operator, which needs torch only, to it.
    """

    def find_spec(self, name, path=None, target=None):
        if name != _DIFFUSERS_LOADER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                _register_with_diffusers(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register
        return spec


if _DIFFUSERS_LOADER in sys.modules:
    _register_with_diffusers(sys.modules[_DIFFUSERS_LOADER])
else:
    sys.meta_path.insert(0, _RegisterOnImport())
