"""Folders that results are written to. Imports no torch."""

import tempfile
from pathlib import Path


def check_writable(path: Path, option: str) -> None:
    """Raise ValueError unless something can be written into the folder `path`; leaves nothing there."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"cannot write into {path}: {existing} is a file; give another folder with {option}")
    try:
        # Permission bits do not tell root, a full disk, or a file system that takes no files.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write into {path}: {existing} takes no files ({error.strerror}); "
            f"give another folder with {option}"
        ) from None
