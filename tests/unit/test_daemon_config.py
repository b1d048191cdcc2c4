"""The daemon's settings, files and service: what is taken, what is refused, and who can read it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from omnara.errors import ConfigurationError
from omnara.machines.daemon.config import DaemonConfig, Home, Status, checked_url
from omnara.machines.daemon.run import _here, binding
from omnara.machines.daemon.service import Service
from omnara.machines.daemon.setup import daemon_command
from omnara.setting_daemon import read_daemon_settings
from omnara.settings import load_daemon, unknown_variables

CONFIG = DaemonConfig(
    api_url="https://omnara.example.com",
    installation_id="inst_a",
    machine_id="mch_a",
    machine_token="omnara_daemon_v1_x",
)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://omnara.example.com", "https://omnara.example.com"),
        (" https://omnara.example.com:8443/base/ ", "https://omnara.example.com:8443/base"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.9.9.9", "http://127.9.9.9"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://localhost:8080", "http://localhost:8080"),
        ("http://host.docker.internal:8080", "http://host.docker.internal:8080"),
    ],
)
def test_addresses_to_which_a_token_may_travel(url: str, kept: str) -> None:
    assert checked_url(url) == kept


@pytest.mark.parametrize(
    "url",
    [
        "http://omnara.example.com",
        "http://10.0.0.1",
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "http://localhost@example.com",
        "https://user:password@example.com",
        "https://example.com/?a=b",
        "https://example.com/#a",
        "https://",
        "ftp://example.com",
        "example.com",
        "https://[::1",
        "",
    ],
)
def test_addresses_to_which_it_may_not(url: str) -> None:
    with pytest.raises(ConfigurationError):
        checked_url(url)


def test_the_binding_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "omnara")
    assert home.load() is None
    home.save(CONFIG)
    file = tmp_path / "omnara" / "daemon.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(file.read_text()) == {
        "schema_version": 1,
        "api_url": "https://omnara.example.com",
        "installation_id": "inst_a",
        "machine_id": "mch_a",
        "machine_token": "omnara_daemon_v1_x",
        "no_update": True,
        "runner_path": "",
    }
    assert home.load() == CONFIG
    assert [one.name for one in file.parent.iterdir()] == ["daemon.json"]


def test_neither_a_damaged_file_nor_a_newer_one_is_guessed_at(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for text in ("{", "{}", '{"schema_version": 1}'):
        (tmp_path / "daemon.json").write_text(text)
        with pytest.raises(ConfigurationError, match="damaged"):
            home.load()
    home.save(CONFIG)
    newer = json.loads((tmp_path / "daemon.json").read_text()) | {"schema_version": 2}
    (tmp_path / "daemon.json").write_text(json.dumps(newer))
    with pytest.raises(ConfigurationError, match="another version"):
        home.load()


def test_no_repr_shows_the_token() -> None:
    settings = read_daemon_settings({"HOME": "/root", "OMNARA_MACHINE_TOKEN": "omnara_daemon_v1_x"})
    assert "omnara_daemon_v1_x" not in repr(CONFIG) + repr(settings)


def test_a_wipe_takes_the_machine_and_its_binding_and_nothing_else(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.save(CONFIG)
    other = DaemonConfig(api_url="https://b", installation_id="inst_a", machine_id="mch_b", machine_token="b")
    for one in (CONFIG, other):
        home.state(one).mkdir(parents=True)
    home.wipe(other)
    assert not home.state(other).exists()
    assert home.state(CONFIG).exists()
    assert home.load() == CONFIG
    home.wipe(CONFIG)
    assert not home.state(CONFIG).exists()
    assert home.load() is None
    home.wipe(CONFIG)


def test_one_daemon_for_one_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "omnara")
    assert home.said() is None
    assert not home.root.exists(), "a look changes nothing"
    with home.locked() as ours:
        assert ours
        assert home.said() == Status(pid=0, state="starting", since="")
        status = Status(pid=7, state="connected", since="2026-08-01T10:00:00+00:00")
        home.say(status)
        with Home(tmp_path / "omnara").locked() as theirs:
            assert not theirs
        assert home.said() == status
    assert home.said() is None


def test_what_is_given_now_counts_for_more_than_what_is_kept() -> None:
    nothing = read_daemon_settings({"HOME": "/root"})
    assert binding(nothing, CONFIG) == ("https://omnara.example.com", "omnara_daemon_v1_x")
    given = read_daemon_settings(
        {"HOME": "/root", "OMNARA_API_URL": "http://127.0.0.1:1/", "OMNARA_MACHINE_TOKEN": "other"}
    )
    assert binding(given, CONFIG) == ("http://127.0.0.1:1", "other")
    with pytest.raises(ConfigurationError, match="OMNARA_API_URL and OMNARA_MACHINE_TOKEN"):
        binding(nothing, None)
    with pytest.raises(ConfigurationError, match="set OMNARA_MACHINE_TOKEN,"):
        binding(read_daemon_settings({"HOME": "/root", "OMNARA_API_URL": "https://a"}), None)


@pytest.mark.parametrize("token", ["a b", "a\nX-Other: b", "tökén", "a\x7f"])
def test_a_token_that_no_header_carries_is_refused_before_it_is_sent(token: str) -> None:
    settings = read_daemon_settings({"HOME": "/root", "OMNARA_API_URL": "https://a", "OMNARA_MACHINE_TOKEN": token})
    with pytest.raises(ConfigurationError, match="printable"):
        binding(settings, None)


def test_the_variables(tmp_path: Path) -> None:
    settings = load_daemon(
        {"OMNARA_HOME": str(tmp_path), "OMNARA_API_URL": " ", "OMNARA_DAEMON_SLEEP_AFTER_MS": "30000", "A": "b"}
    )
    assert (settings.home, settings.api_url, settings.sleep_after_s) == (tmp_path, None, 30.0)
    assert settings.environment["A"] == "b"
    for name, value in (("OMNARA_DAEMON_SLEEP_AFTER_MS", "29999"), ("OMNARA_DAEMON_SLEEP_AFTER_MS", "soon")):
        with pytest.raises(ConfigurationError, match=name):
            load_daemon({"OMNARA_HOME": str(tmp_path), name: value})
    with pytest.raises(ConfigurationError, match="OMNARA_HOME"):
        load_daemon({"OMNARA_HOME": "relative/path"})


def test_a_server_knows_the_daemons_variables_from_misspelt_ones() -> None:
    assert unknown_variables({"OMNARA_HOME": "/h", "OMNARA_API_URL": "https://a", "OMNARA_MACHINE_TOKEN": "t"}) == []


def test_the_service_restarts_what_failed_and_signals_only_the_daemon(tmp_path: Path) -> None:
    service = Service(tmp_path / "systemd" / "user")
    service.write(["/home/a b/50%/omnara", "daemon", "run"], Path('/home/a b/"x"'))
    lines = service.unit.read_text().splitlines()
    assert 'ExecStart="/home/a b/50%%/omnara" "daemon" "run"' in lines
    assert 'Environment="OMNARA_HOME=/home/a b/\\"x\\""' in lines
    assert {"Restart=on-failure", "RestartSec=3", "KillMode=process"} <= set(lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd to ask")
def test_systemd_understands_the_service(tmp_path: Path) -> None:
    program = tmp_path / "a b" / "50%$x"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    service = Service(tmp_path)
    service.write([str(program), "daemon", "run"], tmp_path / 'some "home"')
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    asked = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(service.unit)], capture_output=True, text=True, env=environment
    )
    assert (asked.returncode, asked.stdout + asked.stderr) == (0, "")


def test_the_service_follows_the_installers_link(tmp_path: Path) -> None:
    assert daemon_command(tmp_path)[1:] == ["-m", "omnara", "daemon", "run"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "omnara").touch()
    assert daemon_command(tmp_path) == [str(tmp_path / "bin" / "omnara"), "daemon", "run"]


def test_commands_that_name_no_directory_run_where_the_daemon_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "work"
    started.mkdir()
    monkeypatch.chdir(started)
    assert _here({"HOME": "/home/me"}) == str(started)
    started.rmdir()
    assert _here({"HOME": "/home/me"}) == "/home/me"
    assert _here({}) == "/"


def test_a_home_that_cannot_be_had_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot use .*file/home"), Home(tmp_path / "file" / "home").locked():
        pass
