"""Programs of `eval/` and `train/`, which are no part of the package, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def load_program(path: str) -> ModuleType:
    """The program at `path`, relative to the repository, loaded anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
