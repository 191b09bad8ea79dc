"""Folders with a stock SANA model made into folders with an MHLA one."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import SanaTransformer2DModel
from safetensors import safe_open

from mhla_diffusion.models.convert import convert
from mhla_diffusion.weights import check_pipeline, check_safetensors

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def convert_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    block_grid: Sequence[int] = (4, 4),
    layers: str | Sequence[int] = "all",
) -> Path:
    """Convert the transformer in `source` and write the result to the new folder `out`, which appears whole.

    `source` is a pipeline folder (the other components are copied as they are) or a transformer folder, in
    Diffusers' layout; weights keep their dtype. Raises ValueError when it is neither, when a file in it is
    cut short, or when `out` exists.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already: give the name of a new folder")
    is_pipeline = (source / "model_index.json").is_file()
    folder = source / "transformer" if is_pipeline else source
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} is neither a pipeline nor a transformer folder in Diffusers' layout "
            f"(no {folder / 'config.json'}): give such a folder"
        )
    if is_pipeline:
        check_pipeline(source)
    for path in folder.glob("*.safetensors"):
        check_safetensors(path)
    class_name = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_class_name")
    if class_name != "SanaTransformer2DModel":
        raise ValueError(
            f"{folder} holds a {class_name}; only a stock SanaTransformer2DModel can be converted"
        )

    stock = SanaTransformer2DModel.from_pretrained(folder, dtype=stored_dtype(folder), local_files_only=True)
    model = convert(stock, block_grid=tuple(block_grid), layers=layers)
    part = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        if is_pipeline:
            shutil.copytree(
                source, part, ignore=lambda path, _: ["transformer"] if Path(path) == source else []
            )
            index = json.loads((source / "model_index.json").read_text(encoding="utf-8"))
            index["transformer"] = ["mhla_diffusion", type(model).__name__]
            (part / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        model.save_pretrained(part / "transformer" if is_pipeline else part)
        os.replace(part, out)
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror}): give another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest floating type among the stored tensors; a half-precision model keeps some in float32."""
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.get_slice(key).get_dtype() for key in file.keys())
    return next((DTYPES[name] for name in ("F16", "BF16") if name in names), torch.float32)
