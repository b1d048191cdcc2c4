"""Settings: what is accepted, what a wrong value says, and that the README tells the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from omnara import settings
from omnara.errors import ConfigurationError
from omnara.setting_table import SPECS

ROOT = Path(__file__).parents[2]


def test_an_empty_environment_gives_the_defaults() -> None:
    found = settings.load({})
    assert str(found.listen) == "127.0.0.1:8080"
    assert str(found.ops_listen) == "127.0.0.1:8081"
    assert found.roles == {"api", "worker", "maintenance"}
    assert (found.worker_lease_s, found.worker_renew_s, found.worker_probe_s) == (30.0, 5.0, 0.1)
    assert found.database_url is None


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("OMNARA_WORKER_DRAIN_TIMEOUT", "1500ms", "worker_drain_timeout_s", 1.5),
        ("OMNARA_WORKER_DRAIN_TIMEOUT", "2m", "worker_drain_timeout_s", 120.0),
        ("OMNARA_WORKER_DRAIN_TIMEOUT", " 7 ", "worker_drain_timeout_s", 7.0),
        ("OMNARA_CONTEXT_CACHE_BYTES", "64MiB", "context_cache_bytes", 64 * 2**20),
        ("OMNARA_WORKER_CAPACITY", "3", "worker_capacity", 3),
        ("OMNARA_LOG_LEVEL", "WARNING", "log_level", "warning"),
        ("OMNARA_ROLES", "worker, api", "roles", frozenset({"api", "worker"})),
        ("OMNARA_ALLOWED_PRIVATE_HOSTS", "a:1, b ,,a:1", "allowed_private_hosts", ("a:1", "b")),
        ("OMNARA_LISTEN", ":80", "listen", settings.Address("", 80)),
        ("OMNARA_LISTEN", "[::1]:80", "listen", settings.Address("::1", 80)),
        ("OMNARA_WORKER_CAPACITY", "", "worker_capacity", 512),
    ],
)
def test_texts_are_read(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(settings.load({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("OMNARA_WORKER_CAPACITY", "0", "at least 1"),
        ("OMNARA_WORKER_CAPACITY", "many", "whole number"),
        ("OMNARA_WORKER_LEASE", "-3", "duration"),
        ("OMNARA_WORKER_LEASE", "nan", "duration"),
        ("OMNARA_CONTEXT_CACHE_BYTES", "5MB", "bytes"),
        ("OMNARA_LISTEN", "8080", "HOST:PORT"),
        ("OMNARA_LISTEN", "x:70000", "HOST:PORT"),
        ("OMNARA_ROLES", "api,cook", "api, worker, maintenance"),
        ("OMNARA_LOG_LEVEL", "loud", "debug, info, warning, error"),
        ("OMNARA_WORKER_RENEW", "20", "third"),
        ("OMNARA_WORKER_PROBE", "4", "tenth"),
        ("OMNARA_DATABASE_DIRECT_URL", "postgresql://x", "OMNARA_DATABASE_URL"),
        ("OMNARA_SECRET_ENCRYPTION_KEYS", "k1:secret", "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY"),
    ],
)
def test_a_wrong_value_names_the_variable_and_what_is_expected(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(variable)) as caught:
        settings.load({variable: text})
    assert says in str(caught.value)


@pytest.mark.parametrize("variable", ["ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OMNARA_API_KEY"])
@pytest.mark.parametrize("broken", ["canary\n7f3a", "canary 7f3a", "canary\t7f3a", "canary–7f3a", "canary\x7f"])
def test_a_key_that_no_header_carries_is_refused(variable: str, broken: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable} must be printable ASCII") as caught:
        settings.load({variable: broken})
    assert "canary" not in str(caught.value)
    assert settings.load({variable: "  sk-ant-api03_AZaz09.+/=~ \n"})


@pytest.mark.parametrize("variable", ["OMNARA_DATABASE_URL", "OMNARA_DATABASE_DIRECT_URL"])
@pytest.mark.parametrize("end", ["#x@h:1/db", "/x@h:1/db", "?x@h:1/db", "@h:port/db", "@[::bad/x", "@h:1,h2:x/db"])
def test_a_database_url_that_cannot_be_read_is_refused_without_its_password(variable: str, end: str) -> None:
    """Source: field-reports B16: the driver's own error quotes what it takes for the port."""
    fine = {"OMNARA_DATABASE_URL": "postgresql://h/db"}
    with pytest.raises(ConfigurationError, match=f"{variable} has no readable host") as caught:
        settings.load(fine | {variable: f"postgresql://u:canary-7f3a{end}"})
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:a%23b@h:5432/db?sslmode=require",
        "postgresql://u@[::1]:5432/db",
        "postgresql://u:a:b@h1:1,h2:2/db?target_session_attrs=any",
        "postgresql://u@/db?host=/run/postgresql",
        "postgresql://u@%2Frun%2Fpostgresql/db",
        "postgresql:///db",
    ],
)
def test_database_urls_of_all_forms_are_taken(url: str) -> None:
    assert settings.load({"OMNARA_DATABASE_URL": url}).database_url == url


@pytest.mark.parametrize("path", ["/da\nta", "/caf\udce9", "~no-such-user/data"])
def test_a_directory_that_cannot_be_used_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="OMNARA_DATA_DIR must be"):
        settings.load({"OMNARA_DATA_DIR": path})


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    """As in containers, where a user may be a number and nothing else."""
    script = """import os
os.environ.pop("HOME", None)
os.geteuid = os.getuid = lambda: 1234567
from omnara.settings import load, load_daemon
print(load({"OMNARA_DATA_DIR": "/data"}).data_dir, load_daemon({"OMNARA_HOME": "/daemon"}).home)
try:
    load({})
except Exception as error:
    print(error)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "/data /daemon",
        "configuration error: OMNARA_DATA_DIR is not set, and this user has no home directory to put it in",
    ]


def test_a_wrong_value_is_not_repeated() -> None:
    secret = "k1:canary-7f3a"
    with pytest.raises(ConfigurationError) as caught:
        settings.load({"OMNARA_SECRET_ENCRYPTION_KEYS": secret, "OMNARA_LISTEN": secret, "OMNARA_WORKER_LEASE": secret})
    assert "canary" not in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings.load({"OMNARA_LISTEN": "8080", "OMNARA_LOG_LEVEL": "loud"})
    assert "OMNARA_LISTEN" in str(caught.value)
    assert "OMNARA_LOG_LEVEL" in str(caught.value)


def test_secrets_do_not_show() -> None:
    secrets = {spec.env: "canary-7f3a" for _, _, spec in SPECS if spec.secret}
    secrets |= {"OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": "k1"}
    found = settings.load(secrets)
    assert "canary" not in repr(found)
    assert "canary" not in str(found)


def test_a_misspelt_variable_is_pointed_out() -> None:
    warnings = settings.unknown_variables({"OMNARA_WORKER_CAPACTY": "3", "OMNARA_TEST_PG_BIN": "x", "PATH": "y"})
    assert len(warnings) == 1
    assert "OMNARA_WORKER_CAPACITY" in warnings[0]


def test_every_setting_has_a_meaning_and_a_name_of_its_own() -> None:
    names = [spec.env for _, _, spec in SPECS]
    assert len(set(names)) == len(names)
    assert all(len(spec.meaning) > 10 for _, _, spec in SPECS)


def test_a_child_inherits_none_of_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNARA_DATABASE_URL", "postgresql://production")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "real")
    monkeypatch.setenv("UNRELATED", "kept")
    environment = settings.child_environment({"OMNARA_DATA_DIR": "/d"})
    assert "OMNARA_DATABASE_URL" not in environment
    assert "ANTHROPIC_API_KEY" not in environment
    assert (environment["UNRELATED"], environment["OMNARA_DATA_DIR"]) == ("kept", "/d")


def test_only_the_settings_read_the_environment() -> None:
    offenders = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "omnara").rglob("*.py")
        if re.search(r"os\.(environ|getenv)", path.read_text()) and path.name != "settings.py"
    ]
    assert offenders == []


@pytest.mark.parametrize("url", ["https://omnara.example.com", "http://10.0.0.1:8080/base/", "https://[::1]:8443"])
def test_a_public_url_is_an_address_that_a_shell_can_hold(url: str) -> None:
    assert settings.load({"OMNARA_PUBLIC_URL": url}).public_url == url


@pytest.mark.parametrize(
    "url", ["omnara.example.com", "ftp://x", "https://x?a=b", "https://x/$(id)", "https://x';id;'"]
)
def test_another_public_url_stops_the_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="OMNARA_PUBLIC_URL"):
        settings.load({"OMNARA_PUBLIC_URL": url})
