"""Training: recipes, data, the loop. `run(recipe_path)` does it all; the parts import one by one."""

from __future__ import annotations

_LAZY = {
    "run": ".loop",
    "load_recipe": ".recipe",
    "Recipe": ".config",
    "trainable": ".parameters",
    "flow_losses": ".validation",
}

__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)
