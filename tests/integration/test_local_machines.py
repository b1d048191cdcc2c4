"""Machines of the local pool: what their commands can reach, and what is left of one that was deleted."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from omnara.machines.posix import Launcher, Limits, PosixHome
from omnara.machines.posix.sandbox import Bubblewrap, bubblewrap_problem
from omnara.machines.processes import ProcessRecord, ProcessSpec
from omnara.machines.providers import local, local_files
from omnara.machines.providers.local import Confinement, LocalProvider, Unconfined, confinement, host_id
from omnara.machines.providers.protocol import InvalidOptions, MachineSpec, ProvisionFailed
from tests.support.posix_home import alive, kill
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes and users are Linux's")

LIMITS = Limits(grace_s=0.3, write_s=0.5)
NUMBERS = itertools.count(1)
PROBLEM = None if "CI" in os.environ else bubblewrap_problem()
WITH_BUBBLEWRAP = pytest.mark.skipif(PROBLEM is not None, reason=f"needs bubblewrap: {PROBLEM}")


def modes() -> list[object]:
    """The ways that work on this computer; the others are skipped with the reason."""
    problem = bubblewrap_problem()
    return [
        pytest.param(
            "bubblewrap", marks=pytest.mark.skipif(problem is not None, reason=f"needs bubblewrap: {problem}")
        ),
        pytest.param("user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")),
    ]


@pytest.fixture
def place() -> AsyncIterator[Path]:
    """A directory that other users may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="omnara-local-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Pool:
    """A local pool and its machines."""

    def __init__(self, root: Path, confined: Confinement) -> None:
        self.root = root
        self.provider = LocalProvider(root, host="host_1", confined=confined, limits=LIMITS)
        self.machines: list[MachineSpec] = []
        self.homes: list[PosixHome] = []

    async def machine(self, **options: object) -> tuple[MachineSpec, PosixHome]:
        """One more machine."""
        number = next(NUMBERS)
        spec = MachineSpec(
            machine_id=f"mch_{number}",
            installation_id="inst_1",
            allocation_name=f"omnara-mch-{number}",
            options=options,
        )
        resource = await self.provider.provision(spec)
        self.machines.append(spec)
        self.homes.append(await self.provider.open_home(spec, resource.resource_id))
        return spec, self.homes[-1]

    async def close(self) -> None:
        """Delete them all."""
        for home in self.homes:
            await home.close()
        for machine in self.machines:
            await self.provider.delete(machine, machine.allocation_name)
        await self.provider.close()


@pytest_asyncio.fixture(params=modes())
async def pool(request: pytest.FixtureRequest, place: Path) -> AsyncIterator[Pool]:
    found = Pool(place / "machines", request.param)
    yield found
    await found.close()


async def run(home: PosixHome, command: str, **fields: object) -> tuple[str, ProcessRecord]:
    """Run a command to its end; return what it printed and how it ended."""
    spec = ProcessSpec(process_id=f"prc_{next(NUMBERS)}", command=command, **fields)  # type: ignore[arg-type]
    await home.prepare(spec)
    await home.execute(spec.process_id, 10)
    record = await home.watch(spec.process_id, 1 << 60, 10)
    assert record.exit is not None, record
    return (await home.read(spec.process_id, 0, 1 << 20)).data.decode(), record


async def test_a_machine_is_a_place_to_work_in(pool: Pool) -> None:
    _, home = await pool.machine()
    text, record = await run(
        home, "echo data > file; cat file; pwd; echo $HOME; echo t > ${TMPDIR:-/tmp}/t; echo e > /dev/stderr"
    )
    assert record.exit is not None
    assert record.exit.exit_code == 0, text
    lines = text.split()
    assert lines[0] == "data"
    assert lines[1] == lines[2]
    text, record = await run(
        home, "echo x > /dev/shm/omnara-test && rm /dev/shm/omnara-test && echo x > /dev/null && whoami; exit 0"
    )
    assert record.exit is not None
    assert record.exit.exit_code == 0, text
    assert "denied" not in text, text
    text, _ = await run(home, "cat file; cat ${TMPDIR:-/tmp}/t; stty size", io_mode="pty")
    assert text.split() == ["data", "t", "24", "80"]
    _, killed = await run(home, "kill -9 $$")
    assert killed.exit is not None
    assert (killed.exit.reason_code, killed.exit.exit_signal) == ("signal", "killed")


async def test_a_servers_umask_hides_nothing_from_a_machine(pool: Pool) -> None:
    before = os.umask(0o077)
    try:
        _, home = await pool.machine()
    finally:
        os.umask(before)
    text, _ = await run(home, "cat /etc/passwd /etc/group > names; echo $?; echo $HOME > ${TMPDIR:-/tmp}/t; echo $?")
    assert text == "0\n0\n"


def warmed_with_a_key(launcher: Launcher) -> bool:
    """Start the fork server from a thread that has a key in its session, as a login has; False where none can be."""
    libc = ctypes.CDLL(None)
    join_session_keyring, into_session = ctypes.c_int(1), ctypes.c_int(-3)
    joined = libc.syscall(250, join_session_keyring, None)
    added = libc.syscall(248, b"user", b"omnara-test-key", b"secret", 6, into_session)
    launcher.warm()
    return joined >= 0 and added >= 0 and "omnara-test-key" in Path("/proc/keys").read_text()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls by number, which is another one elsewhere")
@pytest.mark.skipif(os.geteuid() != 0, reason="the keys of one's own user are to be seen in any case")
async def test_keys_of_the_login_that_the_server_came_from_stay_there(pool: Pool) -> None:
    """Possession is inherited, whatever user one becomes."""
    if not await asyncio.to_thread(warmed_with_a_key, pool.provider._launcher):
        pytest.skip("no keys can be had here")
    _, home = await pool.machine()
    text, _ = await run(home, "grep -c omnara-test-key /proc/keys; cat /proc/keys > /dev/null; echo $?")
    assert text == "0\n0\n"
    told = Path(f"/proc/{pool.provider._launcher.pid}/cmdline").read_bytes().split(b"\0")
    assert told[-2:] == [b"none", b""], "one empty keyring for all of them: see test_posix_surroundings"


@WITH_BUBBLEWRAP
async def test_a_pools_directory_may_have_a_name_that_is_no_text(place: Path) -> None:
    pool = Pool(place / os.fsdecode(b"caf\xe9 \n"), "bubblewrap")
    try:
        _, home = await pool.machine()
        text, _ = await run(home, "echo data > file; cat file; pwd")
        assert text == "data\n/workspace\n"
    finally:
        await pool.close()


async def test_a_relative_directory_is_below_the_machines(pool: Pool) -> None:
    """As in a container, whatever the machine's own is: the server has put that before it."""
    spec, home = await pool.machine()
    inside, _ = await run(home, "mkdir -p here/now; pwd")
    other = await pool.provider.open_home(msgspec.structs.replace(spec, cwd="here"), spec.allocation_name)
    pool.homes.append(other)
    for each in (home, other):
        for asked, found in (("here/now", "/here/now"), ("here", "/here"), ("", ""), ("./here/../here", "/here")):
            text, _ = await run(each, "pwd -P", cwd=asked)
            assert text == f"{inside.strip()}{found}\n"


async def test_commands_cannot_read_what_the_server_can(pool: Pool, place: Path) -> None:
    """The server here is this process: its key, its environment, its memory and its sockets' directory."""
    key = place / "keys"
    key.mkdir(mode=0o700)
    (key / "keyring").write_text("the-key")
    (key / "keyring").chmod(0o600)
    marker = f"secret-{secrets.token_hex(8)}"
    server = subprocess.Popen(["sleep", "600"], env={"OMNARA_API_KEY": marker})
    _, home = await pool.machine()
    state = pool.root / "machines" / pool.machines[0].allocation_name / "state"
    attempts = [
        f"cat {key}/keyring",
        f"ls {key}",
        f"cat /proc/{server.pid}/environ",
        f"cat /proc/{server.pid}/root{key}/keyring",
        f"cat /proc/{os.getpid()}/environ /proc/{os.getpid()}/mem",
        f"cat /proc/1/root{key}/keyring /proc/1/environ",
        f"ls /proc/{os.getpid()}/fd /proc/$PPID/fd /proc/$PPID/cwd/",
        f"ls {state}; cat {state}/processes/*/lock",
        f"kill -0 {os.getpid()}; kill -9 {server.pid}",
        f"mkdir -p /mnt/x && mount -t proc proc /mnt/x && cat /mnt/x/{server.pid}/environ",
        "touch /usr/omnara-was-here",
        "chroot / true",
    ]
    try:
        for attempt in attempts:
            text, record = await run(home, attempt)
            assert "the-key" not in text, attempt
            assert marker not in text, attempt
            assert "OMNARA_API_KEY" not in text, attempt
            assert record.exit is not None
            assert record.exit.exit_code not in (0, None), f"{attempt}: {text}"
        assert server.poll() is None, "a command could kill the server"
    finally:
        server.kill()
        server.wait()


async def test_commands_cannot_become_anybody_else(pool: Pool) -> None:
    _, home = await pool.machine()
    text, _ = await run(home, "grep -E 'CapEff|NoNewPrivs' /proc/self/status; id -u; ulimit -u", shell="bash")
    words = text.split()
    assert int(words.pop()) <= 4096, "a fork bomb has an end"
    assert words[:4] == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    assert words[4] != "0" or os.geteuid() != 0


async def test_machines_cannot_see_each_other(pool: Pool) -> None:
    first, one = await pool.machine()
    second, other = await pool.machine()
    await run(one, "echo mine > secret; chmod 777 secret . ")
    directory = pool.root / "machines" / first.allocation_name / "workspace"
    text, record = await run(
        other, f"cat {directory}/secret ../{first.allocation_name}/workspace/secret ../../../*/secret"
    )
    assert "mine" not in text
    assert record.exit is not None
    assert record.exit.exit_code != 0
    text, _ = await run(other, f"ls {pool.root}/machines; echo x > {directory}/planted")
    assert first.allocation_name not in text.replace(str(directory), "")
    assert not (directory / "planted").exists()
    assert second.allocation_name != first.allocation_name


async def test_nobody_inside_catches_a_command_on_its_way_in(pool: Pool) -> None:
    """A forked child has the keeper's directory open until it becomes the command: nobody may follow it there.

    The spy proves that it can see: it finds the directory of a command that let it.
    """
    _, home = await pool.machine()
    look = (
        "echo looking; while [ ! -e stop ]; do "
        "for f in /proc/[0-9]*/cwd/lock /proc/[0-9]*/fd/*/lock /proc/[0-9]*/root/root/. /proc/[0-9]*/cwd/canary; do "
        'case "$f" in *"*"*) ;; *canary) echo x > seen ;; *) echo "caught $f" ;; esac; done; done; echo looked'
    )
    await home.prepare(ProcessSpec(process_id="prc_spy", command=look))
    await home.execute("prc_spy", 10)
    for _ in range(15):
        await run(home, "true")
    await run(home, "mkdir open; cd open; touch canary; until [ -e ../seen ]; do :; done; touch ../stop")
    await home.watch("prc_spy", 1 << 60, 10)
    text = (await home.read("prc_spy", 0, 1 << 20)).data.decode()
    assert text == "looking\nlooked\n"


async def test_nobody_inside_catches_a_command_that_waits_for_its_grant(pool: Pool) -> None:
    """It is there for as long as a grant takes, and belongs to the keeper until it begins. As long as that is another
    user than the machine's, nobody inside can see its files or end it."""
    if os.geteuid() != 0:
        pytest.skip("without root a sandbox's commands are the keeper's own user")
    _, home = await pool.machine()
    await home.prepare(ProcessSpec(process_id="prc_next", command="echo ran >> ran"))
    look = (
        "for at in 1 2 3 4 5; do for f in /proc/[0-9]*/cwd/lock /proc/[0-9]*/fd/*/lock /proc/[0-9]*/root/root/.; do "
        'case "$f" in *"*"*) ;; *) echo "caught $f" ;; esac; done; done; '
        "kill -9 -1; kill -STOP -1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/} && echo ended $p; done; true"
    )
    text, _ = await run(home, f"sh -c '{look}' 2>/dev/null; echo looked")
    assert "caught" not in text, text
    await home.execute("prc_next", 10)
    record = await home.watch("prc_next", 1 << 60, 10)
    assert record.exit is not None
    assert record.exit.exit_code == 0, record
    text, _ = await run(home, "cat ran")
    assert text == "ran\n"


async def test_what_stays_in_the_background_can_be_found_by_the_next_command_and_ends_with_the_machine(
    pool: Pool, place: Path
) -> None:
    spec, home = await pool.machine()
    script = "echo $$ > pid; exec sleep 611"
    _, record = await run(home, f"setsid sh -c '{script}' & until [ -s pid ]; do :; done")
    assert record.exit is not None
    text, record = await run(home, "kill -0 $(cat pid) && echo there")
    assert text == "there\n"
    [survivor] = _sleeping("611")
    await pool.provider.delete(spec, None)
    await until(lambda: not alive(survivor), "the background process ends with its machine")
    assert await pool.provider.inspect(spec, None) == ("terminated", None)
    assert not list((pool.root / "machines").glob(spec.allocation_name))
    await pool.provider.delete(spec, None)


def _sleeping(seconds: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", seconds.encode()]:
                found.append(int(entry.name))
    return found


async def test_a_machine_is_found_again_with_its_commands(pool: Pool) -> None:
    spec, home = await pool.machine()
    await home.prepare(ProcessSpec(process_id="prc_on", command="echo up; read line; echo got $line"))
    await home.execute("prc_on", 10)
    again = LocalProvider(pool.root, host="host_1", confined=pool.provider._confined, limits=LIMITS)
    try:
        assert await again.provision(spec) == await pool.provider.provision(spec)
        state, resource = await again.inspect(spec, None)
        assert state == "running"
        assert resource is not None
        assert resource.host == "host_1"
        home = await again.open_home(spec, resource.resource_id)
        [record] = await home.processes()
        assert record.supervisor_live
        assert (await home.write("prc_on", "pac_1", 1, b"it\n", close=False)).state == "applied"
        assert (await home.watch("prc_on", 1 << 60, 10)).exit is not None
        assert (await home.read("prc_on", 0, 100)).data == b"up\ngot it\n"
        text, _ = await run(home, "echo new")
        assert text == "new\n"
    finally:
        await again.close()


async def test_directories_that_were_locked_from_inside_are_removed(pool: Pool) -> None:
    spec, home = await pool.machine()
    await run(home, "mkdir -p a/b/c; touch a/b/c/d; ln -s / a/root; chmod 000 a/b/c a/b a")
    await pool.provider.delete(spec, None)
    assert not any(name.startswith((".gone", "omnara")) for name in os.listdir(pool.root))
    assert Path("/usr/bin").is_dir()


async def test_another_installations_directory_is_left_alone(pool: Pool) -> None:
    spec, _ = await pool.machine()
    stranger = MachineSpec(machine_id="mch_x", installation_id="inst_2", allocation_name=spec.allocation_name)
    with pytest.raises(ProvisionFailed):
        await pool.provider.provision(stranger)
    assert await pool.provider.inspect(stranger, None) == ("unknown", None)
    await pool.provider.delete(stranger, None)
    assert (await pool.provider.inspect(spec, None))[0] == "running"


async def test_no_machine_gets_the_user_of_a_deleted_one_that_may_have_left_files(pool: Pool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become other users")
    spec, home = await pool.machine()
    text, _ = await run(home, "id -u")
    await pool.provider.delete(spec, None)
    kept = (pool.root / "users" / text.strip()).is_symlink()
    assert kept == (pool.provider._confined == "user")


@WITH_BUBBLEWRAP
async def test_a_sandbox_that_nobody_could_write_down_ends(place: Path) -> None:
    pool = Pool(place / "machines", "bubblewrap")
    try:
        spec, _ = await pool.machine()
        sandbox = pool.provider._sandbox(spec, await asyncio.to_thread(pool.provider._about, spec))  # type: ignore[arg-type]
        assert sandbox is not None
        hears, says = os.pipe()
        pid = await asyncio.to_thread(sandbox._run, hears)
        assert alive(pid)
        os.close(hears)
        os.close(says)
        await until(lambda: not alive(pid), "it ends with whoever began it")
    finally:
        await pool.close()


@WITH_BUBBLEWRAP
async def test_a_sandbox_ends_when_its_directory_was_removed(place: Path) -> None:
    for name in ("workspace", "tmp", "etc"):
        (place / name).mkdir()
    (place / "etc" / "passwd").write_text("")
    (place / "etc" / "group").write_text("")
    sandbox = Bubblewrap(
        place / "state",
        workspace=place / "workspace",
        tmp=place / "tmp",
        etc=place / "etc",
        network=True,
        look_s=1,
    )
    pid = await sandbox.enter()
    try:
        assert alive(pid)
        (place / "workspace").rmdir()
        await until(lambda: not alive(pid), "it sees that nobody can want it")
    finally:
        await sandbox.destroy()


@WITH_BUBBLEWRAP
async def test_a_machine_without_network(place: Path) -> None:
    pool = Pool(place / "machines", "bubblewrap")
    try:
        _, home = await pool.machine(network="none")
        text, _ = await run(home, "cat /proc/net/dev")
        assert [line.split(":")[0].strip() for line in text.splitlines()[2:]] == ["lo"]
    finally:
        await pool.close()


@WITH_BUBBLEWRAP
async def test_a_killed_sandbox_ends_its_commands_and_is_made_anew(place: Path) -> None:
    pool = Pool(place / "machines", "bubblewrap")
    try:
        spec, home = await pool.machine()
        await home.prepare(ProcessSpec(process_id="prc_on", command="echo up; sleep 600"))
        await home.execute("prc_on", 10)
        sandbox = pool.provider._sandbox(spec, await asyncio.to_thread(pool.provider._about, spec))  # type: ignore[arg-type]
        assert sandbox is not None
        first = await sandbox.enter()
        await home.prepare(ProcessSpec(process_id="prc_next", command="echo once >> ran; cat ran"))
        kill(first)
        ended = (await home.watch("prc_on", 1 << 60, 10)).exit
        assert ended is not None
        assert (ended.reason_code, ended.exit_signal) == ("signal", "killed")
        await until(lambda: not alive(first), "it is gone")
        # What waited for it in there died with it, and is made anew.
        await home.execute("prc_next", 10)
        record = await home.watch("prc_next", 1 << 60, 10)
        assert record.exit is not None
        assert (record.exit.exit_code, (await home.read("prc_next", 0, 100)).data) == (0, b"once\n")
        text, _ = await run(home, "echo new")
        assert text == "new\n"
        assert await asyncio.gather(*(sandbox.enter() for _ in range(5))) == [await sandbox.enter()] * 5
    finally:
        await pool.close()


async def test_without_any_confinement_machines_are_off_unless_somebody_says_unsafe(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setattr(local, "bubblewrap_problem", lambda: "bubblewrap is not installed")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unconfined, match="OMNARA_LOCAL_MACHINES=unsafe"):
        confinement()
    assert confinement(unsafe=True) == "unsafe"
    monkeypatch.undo()
    pool = Pool(place / "machines", "unsafe")
    try:
        _, home = await pool.machine()
        text, _ = await run(home, "pwd; echo $HOME; id -u")
        assert text.split()[0].endswith("/workspace")
        assert int(text.split()[2]) == os.geteuid()
    finally:
        await pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
async def test_a_directory_that_others_cannot_enter_is_refused_with_words(place: Path) -> None:
    place.chmod(0o700)
    provider = LocalProvider(place / "machines", host="host_1", confined="user")
    spec = MachineSpec(machine_id="mch_1", installation_id="inst_1", allocation_name="omnara-mch-1")
    with pytest.raises(ProvisionFailed, match="cannot enter"):
        await provider.provision(spec)


def test_however_deep_a_tree_is_it_can_be_removed(tmp_path: Path) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    (place / "closed" / "in").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").touch()
    outside.chmod(0o500)
    (place / "closed" / "in" / "link").symlink_to(outside)
    (place / "link").symlink_to(outside)
    os.mkfifo(place / "closed" / "pipe")
    at = os.open(place, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("x" * 200, dir_fd=at)
        os.close(os.open("file", os.O_CREAT, dir_fd=at))
        below = os.open("x" * 200, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    (place / "closed").chmod(0)
    local_files.remove_tree(place)
    local_files.remove_tree(place)
    assert os.listdir(tmp_path) == ["outside"]
    assert (outside / "kept").exists()
    assert outside.stat().st_mode & 0o777 == 0o500


async def test_what_a_removal_left_goes_with_the_next_try(place: Path) -> None:
    provider = LocalProvider(place, host="host_1", confined="unsafe")
    (place / ".gone-0123" / "in").mkdir(parents=True)
    await provider.delete(MachineSpec(machine_id="mch_1", installation_id="i", allocation_name="omnara-mch-1"), None)
    assert os.listdir(place) == []


RUNNER = """import os, sys
sign, uid = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), int(sys.argv[2])
os.setsid()
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
for number in range(30_000):
    if os.fork():
        os._exit(0)
    if number % 20 == 0:
        os.write(sign, b".")
"""
"""Never has the same number for longer than a moment."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
async def test_what_forks_all_the_time_does_not_outlive_its_machine(place: Path) -> None:
    uid, sign = 1_879_048_000 + secrets.randbelow(100), place / "sign"
    sign.touch()
    for _ in range(12):
        subprocess.run([sys.executable, "-c", RUNNER, str(sign), str(uid)], check=True)
    await until(lambda: sign.stat().st_size > 20, "they run")
    await asyncio.to_thread(local_files.kill_all_of, uid)
    left = sign.stat().st_size
    with pytest.raises(AssertionError):
        await until(lambda: sign.stat().st_size > left, "something is left", limit_s=0.3)


def test_options_are_checked(place: Path) -> None:
    provider = LocalProvider(place, host="host_1", confined="unsafe")
    provider.validate({}, {})
    provider.validate({}, {"network": "host"})
    for config, options in [
        ({"x": 1}, {}),
        ({}, {"image": "x"}),
        ({}, {"network": "bridge"}),
        ({}, {"network": "none"}),
    ]:
        with pytest.raises(InvalidOptions):
            provider.validate(config, options)


def test_a_host_keeps_its_id(tmp_path: Path) -> None:
    first = host_id(tmp_path / "data")
    assert first.startswith("host_")
    assert host_id(tmp_path / "data") == first
    assert host_id(tmp_path / "other") != first
    assert os.listdir(tmp_path / "data") == ["host-id"]


def test_a_hosts_id_is_nobody_elses_to_change(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        host_id(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "host-id").stat().st_mode & 0o777 == 0o644
