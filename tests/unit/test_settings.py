from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from etl import settings
from etl.errors import ConfigurationError
from etl.settings import Settings, redact, to_url


def write(directory: Path, text: str) -> Path:
    file = directory / "etl.toml"
    file.write_text(text, encoding="utf-8")
    return file


class TestLoad:
    def test_nothing_configured_means_the_embedded_server(self, tmp_path: Path) -> None:
        loaded = settings.load(tmp_path, {"HOME": "/home/ann"})
        assert (loaded.project_dir, loaded.store_url, dict(loaded.databases)) == (tmp_path, None, {})

    def test_project_is_where_the_nearest_file_lies(self, tmp_path: Path) -> None:
        write(tmp_path, '[store]\nurl = "postgresql://outer/db"\n')
        inner, deep = tmp_path / "inner", tmp_path / "inner" / "jobs" / "daily"
        deep.mkdir(parents=True)
        write(inner, '[store]\nurl = "postgresql://inner/db"\n')
        loaded = settings.load(deep, {})
        assert (loaded.project_dir, loaded.store_url) == (inner, "postgresql://inner/db")

    def test_environment_wins_over_the_file(self, tmp_path: Path) -> None:
        write(tmp_path, '[store]\nurl_env = "UNSET"\n[databases.dwh]\nurl = "postgresql://file/db"\n')
        environ = {"ETL_DATABASE_URL": "postgresql://environ/db", "ETL_DATABASE_URL_DWH": "postgresql://environ/dwh"}
        loaded = settings.load(tmp_path, environ)
        assert loaded.store_url == "postgresql://environ/db"
        assert dict(loaded.databases) == {"dwh": "postgresql://environ/dwh"}

    def test_url_env_names_the_variable_to_read(self, tmp_path: Path) -> None:
        write(tmp_path, '[store]\nurl_env = "A"\n[databases.dwh]\nurl_env = "B"\n')
        loaded = settings.load(tmp_path, {"A": "postgresql://a/db", "B": "host=b dbname=db"})
        assert loaded.store_url == "postgresql://a/db"
        assert loaded.database_url("dwh") == "postgresql:///db?host=b"

    def test_everything_wrong_is_listed_at_once(self, tmp_path: Path) -> None:
        file = write(
            tmp_path,
            'colour = 1\n[store]\nurl = 5\nport = 5432\n[databases]\nx = "text"\n'
            '[databases.a]\nurl = "postgresql://h/d"\nurl_env = "E"\n[databases.b]\n[databases.c]\nurl_env = "UNSET"\n'
            '[databases.Bad-Name]\nurl = "postgresql://h/d"\n[databases.d]\nurl = "mysql://h/d"\n',
        )
        with pytest.raises(ConfigurationError) as caught:
            settings.load(tmp_path, {})
        assert sorted((finding.subject, finding.problem) for finding in caught.value.findings) == [
            (f"{file}: colour", "unknown key"),
            (f"{file}: databases.Bad-Name", "not a database name"),
            (f"{file}: databases.a", "both url and url_env are given"),
            (f"{file}: databases.b", "has neither url nor url_env"),
            (f"{file}: databases.c.url_env = UNSET", "the environment variable is not set"),
            (f"{file}: databases.d.url", "neither a postgresql:// URL nor key=value pairs"),
            (f"{file}: databases.x", "is a string, not a table"),
            (f"{file}: store.port", "unknown key"),
            (f"{file}: store.url", "is an integer, not a string"),
        ]

    def test_broken_toml_is_refused_with_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path, "[store\n")
        with pytest.raises(ConfigurationError, match=f"^{file}: not valid TOML: .*line 1"):
            settings.load(tmp_path, {})

    @pytest.mark.parametrize("value", ["", "  "])
    def test_empty_variable_is_refused_instead_of_meaning_embedded(self, tmp_path: Path, value: str) -> None:
        with pytest.raises(ConfigurationError, match="ETL_DATABASE_URL: the environment variable is empty"):
            settings.load(tmp_path, {"ETL_DATABASE_URL": value})

    def test_unknown_database_is_refused_with_the_known_names(self, tmp_path: Path) -> None:
        loaded = settings.load(tmp_path, {"ETL_DATABASE_URL_DWH": "postgresql://h/d"})
        with pytest.raises(ConfigurationError, match=r"database 'lake' is not configured \(known: dwh\); set ETL_DATA"):
            loaded.database_url("lake")

    def test_password_is_shown_neither_by_repr_nor_by_errors(self, tmp_path: Path) -> None:
        loaded = settings.load(
            tmp_path,
            {"ETL_DATABASE_URL": "postgresql://u:hunter2@h/d", "ETL_DATABASE_URL_X": "host=h password=hunter2"},
        )
        assert "hunter2" not in repr(loaded)
        assert "postgresql://u:***@h/d" in repr(loaded)
        for broken in ("postgresql://u:hunter2 x@h/d", "postgresql://u:hunter2%ZZ@h/d", "password='hunter2"):
            with pytest.raises(ConfigurationError) as caught:
                settings.load(tmp_path, {"ETL_DATABASE_URL": broken})
            assert "hunter2" not in str(caught.value)


class TestStateDir:
    def test_variable_wins(self, tmp_path: Path) -> None:
        assert settings.load(tmp_path, {"ETL_STATE_DIR": "/var/x"}).state_dir == Path("/var/x")
        assert settings.load(tmp_path, {"ETL_STATE_DIR": "x"}).state_dir == tmp_path / "x"

    def test_root_keeps_it_outside_of_its_closed_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert settings.load(tmp_path, {"HOME": "/root"}).state_dir == Path("/var/lib/exactly-once-etl")

    @pytest.mark.parametrize(
        ("platform", "environ", "expected"),
        [
            ("linux", {"HOME": "/home/ann"}, "/home/ann/.local/share/exactly-once-etl"),
            ("linux", {"HOME": "/home/ann", "XDG_DATA_HOME": "/data"}, "/data/exactly-once-etl"),
            ("linux", {"HOME": "/home/ann", "XDG_DATA_HOME": "data"}, "/home/ann/.local/share/exactly-once-etl"),
            ("darwin", {"HOME": "/Users/ann"}, "/Users/ann/Library/Application Support/exactly-once-etl"),
        ],
    )
    def test_user_keeps_it_where_the_platform_keeps_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, environ: dict[str, str], expected: str
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("sys.platform", platform)
        assert settings.load(tmp_path, environ).state_dir == Path(expected)


class TestToUrl:
    @pytest.mark.parametrize(
        ("dsn", "url"),
        [
            ("postgresql://u:p@h:1/d?sslmode=require", "postgresql://u:p@h:1/d?sslmode=require"),
            ("postgres://h/d", "postgresql://h/d"),
            ("postgresql+psycopg://h/d", "postgresql://h/d"),
            (" postgresql://h1:1,h2:2/d \n", "postgresql://h1:1,h2:2/d"),
            ("host=h dbname=d", "postgresql:///d?host=h"),
            ("dbname = d", "postgresql:///d"),
            (r"user=u password='it\'s \\ a=b' host=h", "postgresql://u:it%27s%20%5C%20a%3Db@/?host=h"),
            (r"password=a\ b host='' port=5433", "postgresql://:a%20b@/?host=&port=5433"),
        ],
    )
    def test_both_forms_become_urls(self, dsn: str, url: str) -> None:
        assert to_url(dsn) == url

    @pytest.mark.parametrize(
        "dsn", ["", "warehouse", "host=", "host='x", "host=a b", "=x", "mysql://h/d", "postgresql://h:port/d"]
    )
    def test_anything_else_is_refused(self, dsn: str) -> None:
        if dsn == "host=":
            assert to_url(dsn) == "postgresql:///?host="
            return
        with pytest.raises(ConfigurationError):
            to_url(dsn)

    @pytest.mark.parametrize(
        "pairs",
        [
            {"user": "u", "password": "p@/:?#%'\\ ä", "host": "/a b,c", "port": "5433", "dbname": "d d"},
            {"host": "h1,h2", "port": "1,2", "options": "-c a=b", "dbname": "d"},
            {"user": "u:@", "dbname": "d", "sslmode": "disable"},
        ],
    )
    def test_conversion_keeps_the_meaning_for_driver_and_sqlalchemy(self, pairs: dict[str, str]) -> None:
        url = to_url(psycopg.conninfo.make_conninfo(**pairs))
        assert conninfo_to_dict(url) == pairs
        parsed = make_url(url)
        kept = {"user": parsed.username, "password": parsed.password, "dbname": parsed.database, **parsed.query}
        assert {key: value for key, value in kept.items() if value is not None} == pairs


class TestRedact:
    @pytest.mark.parametrize(
        ("text", "redacted"),
        [
            ("postgresql://u:s3cret@h:5432/d", "postgresql://u:***@h:5432/d"),
            (
                "a postgresql://u:s3c@ret@h/d b postgresql://u:s3cret@h/d",
                "a postgresql://u:***@h/d b postgresql://u:***@h/d",
            ),
            ("postgresql://u:s3 cret@h/d", "postgresql://u:***@h/d"),
            ("postgresql://:s3cret@/d?host=%2Frun", "postgresql://:***@/d?host=%2Frun"),
            ("postgresql:///d?user=u&password=s3cret&host=h", "postgresql:///d?user=u&password=***&host=h"),
            ("host=h password=s3cret user=u", "host=h password=*** user=u"),
            (r"host=h password='s3 c\'ret' user=u", "host=h password=*** user=u"),
            (r"password=s3\ cret user=u", "password=*** user=u"),
            ("password='s3 cret", "password=***"),
            ('password = "s3 cret" x', "password = *** x"),
            ("PGPASSWORD=s3cret psql", "PGPASSWORD=*** psql"),
            ('{"password": "s3 cret", "user": "u"}', '{"password": ***, "user": "u"}'),
            ('unexpected spaces found in "s3 cret", use', 'unexpected spaces found in "***", use'),
            ('invalid percent-encoded token: "s3%ZZ"', 'invalid percent-encoded token: "***"'),
        ],
    )
    def test_secret_is_replaced(self, text: str, redacted: str) -> None:
        assert redact(text) == redacted

    @pytest.mark.parametrize(
        "text",
        [
            "postgresql://u@h:5432/d",
            "postgresql://h:5432/d failed, ask dba@example.org",
            'password authentication failed for user "u"',
            "data/orders.csv:12 byte 400 column c: value 'a:b@c' is not int4",
        ],
    )
    def test_rest_stays_as_it_was(self, text: str) -> None:
        assert redact(text) == text

    def test_is_not_fooled_by_its_own_output(self) -> None:
        once = redact("postgresql://u:p@h/d password='x'")
        assert redact(once) == once

    def test_driver_messages_lose_the_password(self) -> None:
        for url in ("postgresql://u:s3 cret@h/d", "postgresql://u:s3cret%ZZ@h/d"):
            with pytest.raises(psycopg.Error) as caught:
                psycopg.connect(url)
            assert "cret" in str(caught.value)
            assert "cret" not in redact(str(caught.value))


def test_settings_are_values() -> None:
    one = Settings(Path("/p"), "postgresql://h/d", {}, Path("/s"))
    assert one == Settings(Path("/p"), "postgresql://h/d", {}, Path("/s"))
