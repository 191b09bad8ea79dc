"""What an unfinished run leaves for the same command: files in a folder that all that decides them gives its name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..pipelines.pictures import write_atomically

DECIDES = "decides.json"


class Kept:
    """States and results by name, below `folder / <hash of decides>`; each file is there whole or not at all.

    Whatever else is looked for is not found: other settings, weights or pictures have another hash.

    Args:
        decides: all that the kept things follow from, as JSON holds it.
        say: is told, in a line, what could not be written or read.
    """

    def __init__(
        self, folder: Path, decides: dict[str, Any], say: Callable[[str], object] = lambda text: None
    ):
        text = json.dumps(decides, sort_keys=True)
        self.above, self.folder = folder, folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.decides, self.say, self.full = json.loads(text), say, False

    def others(self) -> list[str]:
        """What differs in the runs that left something beside, the names of `decides`."""
        found = set()
        for path in self.above.glob(f"*/{DECIDES}"):
            if path.parent == self.folder:
                continue
            try:
                theirs = dict(json.loads(path.read_text(encoding="utf-8")))
            except (
                OSError,
                ValueError,
                TypeError,
            ):  # just removed by a run that ended, or left empty by a power cut
                continue
            found |= {
                name for name in self.decides.keys() | theirs if theirs.get(name) != self.decides.get(name)
            }
        return sorted(found)

    def write(self, name: str, value: Any) -> None:
        """Keep `value`: as JSON where the name ends so, else dicts, lists, plain values and tensors in a file of torch.

        A folder that cannot be written costs no numbers: it is said once, and nothing more is kept.
        """
        if self.full:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / DECIDES).is_file():
                self._write(DECIDES, self.decides)
            self._write(name, value)
        except OSError as error:
            self.full = True
            self.say(
                f"nothing more is kept, should this run break off: {self.folder} cannot be written ({error.strerror})"
            )

    def _write(self, name: str, value: Any) -> None:
        if name.endswith(".json"):
            text = json.dumps(value, indent=1) + "\n"
            write_atomically(self.folder / name, lambda file: file.write(text.encode()))
            return
        import torch

        try:
            write_atomically(self.folder / name, lambda file: torch.save(value, file))
        except RuntimeError as error:
            # What breaks the writing, as a full disk or Ctrl-C, torch replaces by a complaint about positions.
            raise error.__context__ or error from None

    def read(self, name: str) -> Any | None:
        """What was kept under a name, tensors on the CPU; None where there is nothing, or nothing that can be read."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            if name.endswith(".json"):
                return json.loads(path.read_text(encoding="utf-8"))
            import torch

            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch and pickle each raise their own
            self.say(f"{path} cannot be read ({' '.join(str(error).split())[:200]}): it is computed again")
            return None


def forget(folder: Path) -> None:
    """Remove all that was kept below a folder."""
    shutil.rmtree(folder, ignore_errors=True)
