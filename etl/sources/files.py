"""Which files a pattern means, in which order, and under which lasting names.

Patterns are walked here and not by ``glob`` or ``pathlib``: those follow directory links without end, differ between
versions, and leave dangling links out without a word.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

_MAGIC = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"([0-9]+)")

NaturalKey = tuple[tuple[tuple[int, int, str], ...], ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    Attributes:
        split: Its lasting name: the path relative to the base directory when it lies below it, else absolute.
        path: Where it is.
    """

    split: str
    path: Path


def natural_key(name: str) -> tuple[NaturalKey, str]:
    """Sort key by which ``2.csv`` comes before ``10.csv``, directory by directory; the name itself breaks ties."""
    parts = tuple(tuple(_piece(piece) for piece in _DIGITS.split(part) if piece) for part in name.split("/"))
    return parts, name


def _piece(piece: str) -> tuple[int, int, str]:
    return (0, int(piece), "") if _DIGITS.fullmatch(piece) and len(piece) <= 4000 else (1, 0, piece)


def list_files(patterns: Sequence[str], base_dir: Path, warn: Callable[[str], None]) -> list[SourceFile]:
    """All regular files that match, each once, in natural order of their names.

    Hidden names match only patterns that begin with a dot; ``**`` does not follow directory links. A link to a file
    that matches under its own name too is read once, under its own name. Directories are passed over silently;
    dangling links, unreadable directories and things that are no files are told through ``warn``.
    """
    base = Path(os.path.abspath(base_dir))  # noqa: PTH100 - resolve() would follow links and so change lasting names
    names: dict[str, Path] = {}
    for pattern in patterns:
        for path in _expand(_absolute(pattern, base), warn):
            names[_split_name(path, base)] = path
    found = [SourceFile(split, path) for split, path in names.items() if _is_readable_kind(path, warn)]
    return sorted(_without_aliases(found), key=lambda file: natural_key(file.split))


def split_path(split: str, base_dir: Path) -> Path:
    """The path of a split that was read earlier, whether or not it still matches a pattern."""
    return Path(os.path.abspath(base_dir / split))  # noqa: PTH100 - as above


def _absolute(pattern: str, base: Path) -> str:
    return os.path.normpath(base / pattern)


def _split_name(path: Path, base: Path) -> str:
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def _expand(pattern: str, warn: Callable[[str], None]) -> Iterator[Path]:
    anchor = Path(pattern).anchor
    parts = Path(pattern).parts[1:]
    fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    root = Path(anchor, *parts[:fixed])
    if fixed == len(parts):
        return iter([root] if os.path.lexists(root) else [])
    return _walk(root, parts[fixed:], warn)


def _walk(directory: Path, parts: Sequence[str], warn: Callable[[str], None]) -> Iterator[Path]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _walk(directory, rest or ("*",), warn)
        for entry in _entries(directory, warn):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _walk(directory / entry.name, parts, warn)
        return
    for entry in _matching(directory, part, warn):
        if not rest:
            yield directory / entry.name
        elif entry.is_dir():
            yield from _walk(directory / entry.name, rest, warn)


def _matching(directory: Path, part: str, warn: Callable[[str], None]) -> Iterator[os.DirEntry[str]]:
    matches = re.compile(translate(part)).fullmatch
    for entry in _entries(directory, warn):
        if matches(entry.name) and (part.startswith(".") or not entry.name.startswith(".")):
            yield entry


def _entries(directory: Path, warn: Callable[[str], None]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn(f"{directory}: cannot be listed ({error.strerror}); its files are not read")
        return []


def _is_readable_kind(path: Path, warn: Callable[[str], None]) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            warn(f"{path}: is a link whose target cannot be reached ({error.strerror}); it is not read")
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        warn(f"{path}: is no regular file; it is not read")
    return stat.S_ISREG(mode)


def _without_aliases(found: Sequence[SourceFile]) -> Iterator[SourceFile]:
    by_target: dict[str, list[SourceFile]] = {}
    for file in found:
        by_target.setdefault(os.path.realpath(file.path), []).append(file)
    for same in by_target.values():
        yield min(same, key=lambda file: (file.path.is_symlink(), natural_key(file.split)))
