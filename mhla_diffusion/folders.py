"""Folders that results are written to. Imports no torch."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there, and leftovers stay
    fcntl = None


def check_writable(path: Path, option: str | None = None) -> None:
    """Raise ValueError unless something can be written into the folder `path`; leaves nothing there.

    `option` is what the user gave the folder with, for the message.
    """
    again = "give another folder" + (f" with {option}" if option else "")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"cannot write into {path}: {existing} is a file; {again}")
    try:
        # Permission bits do not tell root, a full disk, or a file system that takes no files.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write into {path}: {existing} takes no files ({error.strerror}); {again}"
        ) from None


@contextmanager
def folder_in_the_making(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its name at the end of the block, and is removed when that fails.

    What processes that were killed left of the same `out` is removed first; a folder that a process still works on is
    locked by it and stays. Raises OSError when there is no place for it, or `out` exists by then.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir()
    lock = locked(part)
    try:
        yield part
        os.rename(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_leftovers(out: Path) -> None:
    """Remove the folders that killed processes have left where they were making `out`."""
    for part in out.parent.iterdir():
        found = re.fullmatch(re.escape(f".{out.name}.") + r"(\d+)\.part", part.name)
        # Two signs that nobody works on it: a process in another container has a number that means nothing here.
        if found and part.is_dir() and not part.is_symlink() and not alive(int(found[1])):
            lock = locked(part)
            if lock is not None:
                shutil.rmtree(part, ignore_errors=True)
                os.close(lock)


def locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of `folder` until it is closed; None when another one does."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # taken, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """A block that only one process of a machine is in at a time, of those that name the same file `lock`.

    The others wait. The file stays, since another process may be waiting for it; a process that is killed gives it up.
    Where the file system knows no locks, or on Windows, nobody waits.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def alive(process: int) -> bool:
    """Whether another process has this number; it may be one that took it over."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is somebody else's
        return True
    return True
