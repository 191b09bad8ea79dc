"""What `mhla env` prints: versions, device, the attention backend and why, and the pipelines found."""

import os
import platform
from typing import Any

from mhla_diffusion.provenance import versions
from mhla_diffusion.weights import DEFAULT_PIPELINE, WEIGHTS_VARIABLE, known_pipelines, search_places


def describe_environment() -> dict[str, Any]:
    """Facts about this installation as plain JSON values; loads torch, but no weights."""
    import torch

    from mhla_diffusion.ops import explain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        hardware |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return {
        "versions": versions(),
        "hardware": hardware,
        "attention": explain(torch.device(device)),
        "pipelines": {name: str(path) for name, path in known_pipelines().items()},
        "default_pipeline": DEFAULT_PIPELINE,
        "searched": [
            {"path": str(place.path.absolute()), "why": place.why, "found": place.found}
            for place in search_places(DEFAULT_PIPELINE)
        ],
        WEIGHTS_VARIABLE: os.environ.get(WEIGHTS_VARIABLE),
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts as aligned lines for people."""
    lines = [f"{name:15} {version or 'not installed'}" for name, version in facts["versions"].items()]
    lines += [f"{name:15} {value}" for name, value in facts["hardware"].items()]
    lines.append(f"{'attention':15} {facts['attention']}")
    lines.append(f"{WEIGHTS_VARIABLE:15} {facts[WEIGHTS_VARIABLE] or 'not set'}")
    for name, path in facts["pipelines"].items():
        lines.append(f"{'pipeline':15} {name} in {path}")
    if facts["default_pipeline"] not in facts["pipelines"]:
        lines.append(
            f"{'pipeline':15} {facts['default_pipeline']} not found: clone the repository, whose pipelines/ "
            f"folder holds it, or set {WEIGHTS_VARIABLE} to the folder that holds it"
        )
    for place in facts["searched"]:
        state = "found" if place["found"] else "nothing"
        lines.append(f"{'searched':15} {place['path']} ({place['why']}): {state}")
    return "\n".join(lines)
