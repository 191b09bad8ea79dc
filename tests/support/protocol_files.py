"""Protocol files that tests write, and the results of their runs."""

import json


def protocol(folder, text: str, name: str = "mine"):
    path = folder / f"{name}.yaml"
    path.write_text(f"protocol: {name}\nversion: '1.0'\nsummary: a test\n{text}")
    return str(path)


def result(folder) -> dict:
    return json.loads((folder / "out" / "result.json").read_text())
