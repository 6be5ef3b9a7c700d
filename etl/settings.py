"""Where things are: the project, its databases, the state directory.

Values come from environment variables, then from the file ``etl.toml``, then from defaults::

    [store]
    url = "postgresql://etl@db.example/warehouse"       # or url_env = "NAME_OF_A_VARIABLE"

    [databases.reporting]                               # a target that jobs name: "reporting"
    url_env = "REPORTING_URL"

==========================  ======================================================================================
variable                    meaning
==========================  ======================================================================================
``ETL_DATABASE_URL``        the store's database; neither this nor ``[store]`` means the embedded server
``ETL_DATABASE_URL_<NAME>`` the named database, name in upper case
``ETL_STATE_DIR``           where the embedded server keeps its data
==========================  ======================================================================================

Databases may be written as ``postgresql://`` URLs or as libpq's ``key=value`` strings; both are stored as URLs.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qsl, quote, urlsplit

from etl.errors import ConfigurationError, Finding

APPLICATION = "exactly-once-etl"
FILE_NAME = "etl.toml"
STORE_VARIABLE = "ETL_DATABASE_URL"

_SCHEME = re.compile(r"(?:postgresql|postgres|postgresql\+psycopg)://")
_DATABASE_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PAIR = re.compile(r"\s*([A-Za-z_]+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?:\s+|$)", re.DOTALL)

_SECRETS = (
    # A URL's password reaches to the last @ of the word; or, where somebody left a space in it, to the next @.
    re.compile(r"(://[^:/@\s]*:)(?:\S*@|(?!\d{1,5}(?:[/?\s]|$))[^@\n]*@)"),
    re.compile(
        r"(password[\"']?\s*[=:]\s*)(?:'(?:[^'\\]|\\.)*(?:'|$)|\"(?:[^\"\\]|\\.)*(?:\"|$)|(?:[^\s&'\"\\]|\\.)+)", re.I
    ),
    # psycopg quotes the offending part of a URL, and that part can be the password.
    re.compile(r"((?:unexpected spaces found in|invalid percent-encoded token:) )\".*?\"(?=,|$|\s)", re.M),
)
_REPLACEMENTS = (r"\1***@", r"\1***", r'\1"***"')


def redact(text: str) -> str:
    """``text`` without the passwords of database URLs, ``password=…`` pairs and driver messages; the rest as it was."""
    for pattern, replacement in zip(_SECRETS, _REPLACEMENTS, strict=True):
        text = pattern.sub(replacement, text)
    return text


def to_url(dsn: str) -> str:
    """A database URL from a URL or a libpq ``key=value`` string.

    Raises:
        ConfigurationError: It is neither. The message does not show the text, which may hold a password.
    """
    text = dsn.strip()
    scheme = _SCHEME.match(text)
    if scheme:
        return _checked_url("postgresql://" + text[scheme.end() :])
    return _url_of_pairs(_parse_pairs(text))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment and ``etl.toml`` say.

    Attributes:
        project_dir: Directory of the nearest ``etl.toml`` at or above the start directory, else the start directory.
        store_url: URL of the store's database; None means the embedded server.
        databases: URLs of the named databases.
        state_dir: Where the embedded server keeps its data; may not exist yet.
    """

    project_dir: Path
    store_url: str | None
    databases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    state_dir: Path = field(default_factory=Path)

    def __repr__(self) -> str:
        store = None if self.store_url is None else redact(self.store_url)
        databases = {name: redact(url) for name, url in self.databases.items()}
        return (
            f"Settings(project_dir={str(self.project_dir)!r}, store_url={store!r}, databases={databases!r}, "
            f"state_dir={str(self.state_dir)!r})"
        )

    def database_url(self, name: str) -> str:
        """URL of a named database.

        Raises:
            ConfigurationError: There is none of this name.
        """
        if name not in self.databases:
            known = ", ".join(sorted(self.databases)) or "none"
            raise ConfigurationError(
                f"database {name!r} is not configured (known: {known}); "
                f"set {STORE_VARIABLE}_{name.upper()} or add [databases.{name}] to {FILE_NAME}"
            )
        return self.databases[name]


def load(start: Path, environ: Mapping[str, str]) -> Settings:
    """Read the settings that hold for a command started in ``start``.

    Raises:
        ConfigurationError: The file cannot be read, or some of its keys or variables are wrong: all are listed.
    """
    start = start.resolve()
    file = _find_file(start)
    reader = _Reader(file, _read_file(file), environ)
    store_url = reader.store_url()
    databases = reader.databases()
    if reader.findings:
        raise ConfigurationError.from_findings("settings", reader.findings)
    return Settings(
        project_dir=start if file is None else file.parent,
        store_url=store_url,
        databases=MappingProxyType(databases),
        state_dir=_state_dir(start, environ),
    )


class _Reader:
    """Takes the values out of the file and the environment and collects what is wrong with them."""

    def __init__(self, file: Path | None, content: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.findings: list[Finding] = []
        self._file = file
        self._environ = environ
        known = self._known_keys("", content, ("store", "databases"))
        self._store = self._table("store", known.get("store", {})) or {}
        self._databases = self._table("databases", known.get("databases", {})) or {}

    def store_url(self) -> str | None:
        if STORE_VARIABLE in self._environ:
            return self._from_variable(STORE_VARIABLE)
        return self._from_table("store", self._store)

    def databases(self) -> dict[str, str]:
        prefix = f"{STORE_VARIABLE}_"
        variables = {key.removeprefix(prefix).lower(): key for key in self._environ if key.startswith(prefix)}
        found: dict[str, str | None] = {name: self._from_variable(key) for name, key in sorted(variables.items())}
        for name, value in self._databases.items():
            key = f"databases.{name}"
            if not _DATABASE_NAME.fullmatch(name):
                self._wrong(key, "not a database name", "use a-z, 0-9 and _, a letter first")
            elif name not in found and (table := self._table(key, value)) is not None:
                found[name] = self._from_table(key, table)
        return {name: url for name, url in found.items() if url is not None}

    def _from_table(self, key: str, table: Mapping[str, object]) -> str | None:
        values = self._known_keys(key, table, ("url", "url_env"))
        texts = {name: value for name, value in values.items() if self._is_text(f"{key}.{name}", value)}
        if len(texts) > 1:
            self._wrong(key, "both url and url_env are given", "keep one")
        elif "url" in texts:
            return self._parsed(f"{self._file}: {key}.url", str(texts["url"]))
        elif "url_env" in texts:
            return self._from_variable(str(texts["url_env"]), f"{key}.url_env")
        elif key != "store" and not values:
            self._wrong(key, "has neither url nor url_env", "give one")
        return None

    def _from_variable(self, variable: str, key: str | None = None) -> str | None:
        subject = variable if key is None else f"{self._file}: {key} = {variable}"
        text = self._environ.get(variable)
        if text is None:
            self.findings.append(Finding(subject, "the environment variable is not set", f"export {variable}=…"))
            return None
        if not text.strip():
            # Not taken for "unset": rows would silently go to another database than the one somebody meant.
            self.findings.append(Finding(subject, "the environment variable is empty", "set it to a URL or unset it"))
            return None
        return self._parsed(subject, text)

    def _parsed(self, subject: str, text: str) -> str | None:
        try:
            return to_url(text)
        except ConfigurationError as error:
            self.findings.append(Finding(subject, str(error), "write postgresql://user@host:port/database"))
            return None

    def _known_keys(self, prefix: str, table: Mapping[str, object], known: tuple[str, ...]) -> dict[str, object]:
        for name in table.keys() - set(known):
            self._wrong(f"{prefix}.{name}".lstrip("."), "unknown key", f"known are {', '.join(known)}")
        return {name: value for name, value in table.items() if name in known}

    def _table(self, key: str, value: object) -> Mapping[str, object] | None:
        if isinstance(value, dict):
            return value
        self._wrong(key, f"is {_type_name(value)}, not a table", f"write [{key}]")
        return None

    def _is_text(self, key: str, value: object) -> bool:
        if isinstance(value, str):
            return True
        self._wrong(key, f"is {_type_name(value)}, not a string", "put it in quotes")
        return False

    def _wrong(self, key: str, problem: str, cure: str) -> None:
        self.findings.append(Finding(f"{self._file}: {key}", problem, cure))


def _type_name(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


def _find_file(start: Path) -> Path | None:
    for directory in (start, *start.parents):
        if (directory / FILE_NAME).is_file():
            return directory / FILE_NAME
    return None


def _read_file(file: Path | None) -> Mapping[str, object]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not valid TOML: {redact(str(error))}") from error
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from error


def _state_dir(start: Path, environ: Mapping[str, str]) -> Path:
    explicit = environ.get("ETL_STATE_DIR")
    if explicit:
        return start / Path(explicit).expanduser()
    if sys.platform != "win32" and os.geteuid() == 0:
        # A directory under /root is closed to the account that the server has to run under.
        return Path("/var/lib") / APPLICATION
    return _user_data_dir(environ) / APPLICATION


def _user_data_dir(environ: Mapping[str, str]) -> Path:
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    data_home = Path(environ.get("XDG_DATA_HOME") or "")
    # The XDG specification says that relative paths are to be ignored.
    return data_home if data_home.is_absolute() else home / ".local" / "share"


def _checked_url(url: str) -> str:
    # The driver's messages about malformed URLs quote the password; so what it would refuse is refused here.
    if re.search(r"\s", url):
        raise ConfigurationError("the database URL contains white space; write it as %20")
    if re.search(r"%(?![0-9A-Fa-f]{2})", url):
        raise ConfigurationError("the database URL contains a % that begins no escape; write it as %25")
    try:
        parts = urlsplit(url)
        parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True) if parts.query else None
        _ = parts.port if "," not in parts.netloc else None
    except ValueError:
        raise ConfigurationError("the database URL is malformed") from None
    return url


def _parse_pairs(text: str) -> dict[str, str]:
    pairs = dict(_pairs(text))
    if not pairs:
        raise ConfigurationError("neither a postgresql:// URL nor key=value pairs")
    return pairs


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        pair = _PAIR.match(text, position)
        if pair is None:
            raise ConfigurationError("neither a postgresql:// URL nor key=value pairs")
        raw = pair[2] if pair[2] is not None else pair[3]
        yield pair[1], re.sub(r"\\(.)", r"\1", raw, flags=re.DOTALL)
        position = pair.end()


def _url_of_pairs(pairs: Mapping[str, str]) -> str:
    rest = dict(pairs)
    user, password = rest.pop("user", None), rest.pop("password", None)
    database = rest.pop("dbname", "")
    login = "" if user is None else quote(user, safe="")
    if password is not None:
        login += ":" + quote(password, safe="")
    # Host and port stay parameters: so socket directories and lists of hosts need no special form.
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in rest.items())
    return f"postgresql://{login}{'@' if login else ''}/{quote(database, safe='')}{'?' if query else ''}{query}"
