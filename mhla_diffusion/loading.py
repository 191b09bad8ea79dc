"""`load_pipeline`: the right class for a pipeline folder, and clear words when it cannot be loaded.

Everything is checked before torch or Diffusers is imported, so what is missing is reported at once.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .building import BUILDING
from .weights import DEFAULT_PIPELINE, find_pipeline, known_pipelines, original_files, read_json

# Our pipeline and model classes by name, and the module of each.
OUR_PIPELINES = {
    "MHLADiTPipeline": "mhla_diffusion.pipelines.dit",
    "MHLASanaPipeline": "mhla_diffusion.pipelines.sana",
    "MHLAWanPipeline": "mhla_diffusion.pipelines.wan",
}
OUR_MODELS = {
    "MHLADiTTransformer2DModel": "mhla_diffusion.models.dit",
    "MHLASanaTransformer2DModel": "mhla_diffusion.models.sana",
    "MHLASanaVideoTransformer3DModel": "mhla_diffusion.models.sana_video",
    "MHLAWanTransformer3DModel": "mhla_diffusion.models.wan",
}
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin")


def load_pipeline(name: str | os.PathLike = DEFAULT_PIPELINE, *, hub: bool = False, **kwargs):
    """Load a pipeline with the class that its `model_index.json` names, one of ours or a stock one.

    Args:
        name: path of a pipeline folder, or the name of one in a folder of `$MHLA_WEIGHTS`, in the
            `pipelines/` folder of the checkout, or in an installed package; they are searched in this order.
        hub: ask the Hugging Face Hub for `name` ("owner/name") when it is found nowhere. Nothing is
            downloaded otherwise.
        kwargs: for `from_pretrained`, such as `dtype=torch.bfloat16`.

    Returns:
        The pipeline, a `diffusers.DiffusionPipeline`, on the CPU. Threads may load at the same time: one waits for
        the other. A pipeline draws for one thread at a time, as its scheduler counts the steps.

    Raises:
        ValueError: one line that says what is wrong and what to type: nothing found (with every place
            searched), not a pipeline folder, a folder in a model's original layout, a file missing or cut
            short, a class that neither this package nor Diffusers has, or an index that names a stock model
            for weights of one of ours.
    """
    name = os.fspath(name)
    given = Path(name).expanduser()
    check_layout(given)
    try:
        folder = find_pipeline(name)
    except ValueError as error:
        if given.exists():
            raise
        if not hub:
            raise ValueError(f"{error}{what_there_is(given)}") from None
        if name.count("/") != 1:
            raise ValueError(f"{error}; the Hub takes names like owner/name only") from None
        return load_from_hub(name, kwargs)
    return load_whole(class_named(check_models(folder), folder), folder, kwargs)


def load_whole(cls: type, folder: Path, kwargs: dict):
    """The pipeline in `folder`; ValueError when weights and configs in it do not belong together."""
    again = "its files do not belong together, copy the pipeline folder again"
    try:
        with BUILDING:
            pipe = cls.from_pretrained(folder, **kwargs)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        variants = variants_in(folder) if kwargs.get("variant") is None else ()
        if variants:
            again = f"it holds weights of the variant {', '.join(variants)}, give variant={variants[0]!r}"
        raise ValueError(f"{folder} cannot be loaded ({reason}): {again}") from error
    if kwargs.get("device_map") is None:  # with one, weights may lie on the disk on purpose
        for part, module in pipe.components.items():
            lost = [name for name, x in named_parameters(module) if x.is_meta]
            if lost:
                raise ValueError(
                    f"{folder / part} lacks {len(lost)} weights, the first is {lost[0]}: {again}"
                )
    return pipe


def variants_in(folder: Path) -> list[str]:
    """Which kinds of weights the components have, such as "fp16", where they have no others."""
    from .models.tensor_files import WEIGHT_FILE

    names = {match["variant"] for path in folder.glob("*/*") if (match := WEIGHT_FILE.fullmatch(path.name))}
    return [] if None in names else sorted(names)


def named_parameters(component):
    return component.named_parameters() if hasattr(component, "named_parameters") else ()


def load_from_hub(name: str, kwargs: dict):
    """Download the index of a repository, choose its class, and let that download the rest."""
    from diffusers import DiffusionPipeline

    about_the_index = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
    try:
        index = DiffusionPipeline.load_config(
            name, **{k: v for k, v in kwargs.items() if k in about_the_index}
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no pipeline {name!r} could be had from the Hub: {reason}") from error
    cls = class_named(index.get("_class_name"), name)
    with BUILDING:
        return cls.from_pretrained(name, **kwargs)


def class_named(name, place: Path | str) -> type:
    """A pipeline class of ours or of Diffusers by its name. Raises ValueError when neither has it."""
    if name in OUR_PIPELINES:
        return getattr(importlib.import_module(OUR_PIPELINES[name]), name)
    import diffusers

    if not isinstance(name, str) or not hasattr(diffusers, name):
        raise ValueError(
            f"{place} wants the pipeline class {name!r}, which neither this mhla_diffusion "
            f"({', '.join(OUR_PIPELINES)}) nor diffusers {diffusers.__version__} has: upgrade the one it "
            "comes from"
        )
    return getattr(diffusers, name)


def check_layout(folder: Path) -> None:
    """Raise ValueError when `folder` holds pipelines one level deeper, or is a model's file or original folder."""
    if folder.is_file() and folder.suffix in WEIGHT_SUFFIXES:
        raise ValueError(
            f"{folder} is a file of weights, not a pipeline folder: `mhla convert {folder} "
            f"{folder.with_suffix('')}-mhla --pipeline PIPELINE` makes a pipeline of it (DiT, SANA, Wan and their MHLA "
            "kinds), where PIPELINE is a Diffusers folder that has the other components"
        )
    if not folder.is_dir() or (folder / "model_index.json").is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob("*/model_index.json"))
    if inside:
        raise ValueError(
            f"{folder} holds the pipelines {', '.join(inside)}: give one of them, {folder / inside[0]}"
        )
    original = original_files(folder)
    if original:
        first = original[0]
        what = "Wan's config.json" if first == folder else first.relative_to(folder)
        raise ValueError(
            f"{folder} holds a model in its original layout ({what}, no model_index.json): `mhla convert {first} "
            f"{folder}-mhla --pipeline PIPELINE` makes a pipeline of it (DiT, SANA, Wan and their MHLA kinds), where "
            "PIPELINE is a Diffusers folder that has the other components"
        )


def check_models(folder: Path) -> str | None:
    """Name of the pipeline class; ValueError when the index gives weights of our models to another class.

    A stock class would load such weights, drop every mixing matrix with a log line, and draw wrong pictures.
    """
    index = read_json(folder / "model_index.json")
    for part, value in index.items():
        if not isinstance(value, list) or len(value) != 2:
            continue
        library, name = value
        if library == "mhla_diffusion" and name not in OUR_MODELS:
            raise ValueError(
                f"{folder} wants the model class {name!r}, which this mhla_diffusion does not have "
                f"(it has {', '.join(OUR_MODELS)}): upgrade it"
            )
        config = folder / part / "config.json"
        if name in OUR_MODELS or not config.is_file():
            continue
        settings = read_json(config)
        if settings.get("_class_name") in OUR_MODELS or any(key.startswith("mhla_") for key in settings):
            ours = settings["_class_name"] if settings.get("_class_name") in OUR_MODELS else "MHLA..."
            raise ValueError(
                f"{folder / 'model_index.json'} names {name} for {part}/, but the weights there are of "
                f"{ours}, whose "
                f'mixing matrices {name} would drop: write "{part}": ["mhla_diffusion", "{ours}"]'
            )
    return index.get("_class_name")


def what_there_is(given: Path) -> str:
    """The pipelines that can be named instead, as the end of an error message."""
    found = {name: str(folder) for name, folder in known_pipelines().items()}
    found |= {str(path.parent): "" for path in sorted(given.absolute().parent.glob("*/model_index.json"))}
    return f"; found: {', '.join(found)}" if found else ""


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Without the libraries' own progress bars, which loading and saving show and which break the caller's."""
    import diffusers
    import transformers

    libraries = [
        log for log in (diffusers.utils.logging, transformers.utils.logging) if log.is_progress_bar_enabled()
    ]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
