"""The server's configuration file, written anew before every start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from etl.errors import ConfigurationError

DEFAULTS: Mapping[str, str] = {
    "max_prepared_transactions": "64",
    "wal_level": "logical",
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    # A forgotten slot must not fill the disk.
    "max_slot_wal_keep_size": "1GB",
    "shared_buffers": "128MB",
    "synchronous_commit": "on",
    "log_statement": "none",
}
# The server refuses to start with less than what its stored prepared transactions and slots need.
_NEVER_LOWERED = ("max_prepared_transactions", "max_replication_slots")
_NAME = re.compile(r"[a-z_][a-z0-9_.]*")
_LINE = re.compile(r"([a-z_][a-z0-9_.]*) = '(.*)'")


def write_configuration(file: Path, settings: Mapping[str, str]) -> None:
    """Write the file, readable by the server's account, in one step.

    Numbers that earlier starts had higher stay, and so does a ``wal_level`` of ``logical``.

    Raises:
        ConfigurationError: A name or value cannot be written.
    """
    merged = {**settings, **_kept(settings, _read(file))}
    text = "# Written at every start; changes made here are lost.\n"
    text += "".join(f"{_checked_name(name)} = '{_escaped(name, value)}'\n" for name, value in merged.items())
    making = file.with_name(f".{file.name}")
    making.write_text(text, encoding="utf-8")
    making.chmod(0o644)
    making.replace(file)


def _kept(wanted: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: before[name]
        for name in _NEVER_LOWERED
        if before.get(name, "").isdigit() and wanted.get(name, "").isdigit() and int(before[name]) > int(wanted[name])
    }
    if before.get("wal_level") == "logical":
        kept["wal_level"] = "logical"
    return kept


def _read(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    lines = (_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {line[1]: line[2] for line in lines if line}


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not the name of a server setting")
    return name


def _escaped(name: str, value: str) -> str:
    if not value.isprintable():
        raise ConfigurationError(f"server setting {name} contains a control character")
    return value.replace("\\", "\\\\").replace("'", "''")
