"""Where a build lives: a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MANIFEST = "build.json"


def build_key(settings: dict[str, Any], sources: list[Path]) -> str:
    """Name a build after its settings and the code that makes it."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:12]


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """Close a build: write its record, with the size of every file, as the last file."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({**record, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the record of a complete build, None where anything is missing or cut short."""
    try:
        record: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = record["files"].items()
        whole = all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return record if whole else None


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give a temporary sibling to write into; it becomes `folder` when the block succeeds.

    Processes that build at the same time each write a sibling of their own. The first to finish
    gets the name, and the others drop their work and use it.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    with suppress(OSError):
        temporary.rename(folder)
        return
    if read_manifest(folder) is not None:
        return
    # The name is taken by something incomplete, say a copy that was interrupted.
    discarded = folder.with_name(f"{temporary.name}.old")
    folder.rename(discarded)
    temporary.rename(folder)
    shutil.rmtree(discarded, ignore_errors=True)
