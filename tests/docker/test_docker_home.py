"""Commands in containers, in a shell with nothing around it and in the sandbox's."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import pytest

from omnara.ids import IdKind
from omnara.machines.docker import DockerHome, channel
from omnara.machines.processes import HomeFull, HomeLost, ProcessSpec, StartFailed
from tests.support.docker_engine import BUSYBOX_IMAGE, ENDLESS, Box, new_id

PAC = [new_id(IdKind.PROCESS_ACTION) for _ in range(5)]
UNBORN, ONCE = new_id(), new_id()


async def test_a_command_that_succeeds(machine: Box) -> None:
    record, output = await machine.run("echo out; echo err >&2")
    assert (record.phase, record.execution_committed) == ("terminal", True)
    assert record.exit is not None
    assert (record.exit.state, record.exit.exit_code, record.exit.reason_code) == ("exited", 0, "")
    assert record.exit.started_at == record.started_at
    assert record.exit.started_at is not None
    assert record.exit.ended_at is not None
    assert record.exit.started_at <= record.exit.ended_at
    assert output == "out\nerr\n"
    assert (await machine.read(record.process_id)).closed


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exit 3", ("failed", "nonzero_exit", 3, None)),
        ("exit 137", ("failed", "nonzero_exit", 137, None)),
        ("kill -9 $$", ("failed", "signal", -1, "killed")),
        ("kill -TERM $$", ("failed", "signal", -1, "terminated")),
    ],
)
async def test_a_command_that_fails(machine: Box, command: str, expected: tuple[object, ...]) -> None:
    record, output = await machine.run(command)
    assert record.exit is not None
    ended = record.exit
    assert (ended.state, ended.reason_code, ended.exit_code, ended.exit_signal) == expected
    assert output == "", "the shell's word about a signal is not output"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"cwd": "/no/such"}, "directory"), ({"shell": "zsh"}, "shell is not installed")],
)
async def test_a_start_that_fails_is_an_exit_record(machine: Box, fields: dict[str, object], message: str) -> None:
    record, _ = await machine.run("echo never", **fields)
    assert record.exit is not None
    assert (record.exit.state, record.exit.reason_code, record.exit.started_at) == ("failed", "start_failed", None)
    assert message in record.exit.reason_message


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "echo \0"},
        {"command": "x" * 200_000},
        {"shell": "cmd"},
        {"env": {"A-B": "x"}},
        {"env": {"A": "\0"}},
        {"env": {"A": "x" * 200_000}},
    ],
    ids=str,
)
async def test_what_no_shell_could_be_given_is_refused_before_anything_is_there(
    machine: Box, fields: dict[str, object]
) -> None:
    before = len(await machine.home.processes())
    values = {"command": "true"} | fields
    with pytest.raises(StartFailed):
        await machine.home.prepare(ProcessSpec(process_id=new_id(), **values))  # type: ignore[arg-type]
    assert len(await machine.home.processes()) == before


async def test_environment_directory_and_identity(machine: Box) -> None:
    odd = 'it\'s "quoted" $HOME `id` \\ \n and ünïcode'
    _, output = await machine.run("printf '%s|' \"$ODD\"; pwd; umask; id -u; env | sort", env={"ODD": odd, "LANG": "C"})
    assert output.startswith(odd + "|")
    lines = output.splitlines()
    assert "/home/agent" in output
    assert "0022" in lines
    assert "1000" in lines
    assert "LANG=C" in lines
    names = {line.partition("=")[0] for line in lines if "=" in line and line[0].isupper()}
    assert names <= {"HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "ODD"}


async def test_a_relative_directory_is_below_the_agents(machine: Box) -> None:
    """Whatever the machine's own is: the server has put that before it."""
    await machine.run("mkdir -p here/now")
    spec = msgspec.structs.replace(machine.spec, cwd="here")
    home = await machine.provider.open_home(spec, machine.resource.resource_id)
    other = msgspec.structs.replace(machine, spec=spec, home=home)
    for box in (machine, other):
        for asked, found in (("here/now", "/here/now"), ("here", "/here"), ("", ""), ("./here/../here", "/here")):
            _, output = await box.run("pwd -P", cwd=asked)
            assert output == f"/home/agent{found}\n"
    await home.close()


async def test_what_is_put_into_tmp_can_be_run(machine: Box) -> None:
    _, output = await machine.run("printf '#!/bin/sh\\necho ran\\n' >/tmp/tool; chmod +x /tmp/tool; /tmp/tool")
    assert output == "ran\n"


async def test_input_reaches_a_command_once_and_its_end_too(machine: Box) -> None:
    record = await machine.start("cat; echo over")
    write = machine.home.write
    assert (await write(record.process_id, PAC[1], 1, b"one\n", False)).state == "applied"
    assert (await write(record.process_id, PAC[1], 1, b"one\n", False)).state == "applied"
    large = b"x" * 131_071 + b"\n"
    assert (await write(record.process_id, PAC[2], 2, large, False)).state == "applied"
    assert (await write(record.process_id, PAC[3], 3, b"end\n", True)).state == "applied"
    ended = await machine.end(record.process_id)
    assert ended.output_end == len(b"one\n") + len(large) + len(b"end\nover\n")
    assert [(a.action_id, a.seq) for a in ended.actions] == [(PAC[1], 1), (PAC[2], 2), (PAC[3], 3)]
    after = await write(record.process_id, PAC[4], 4, b"late", False)
    assert (after.state, after.reason_code) == ("failed", "process_terminal")


async def test_a_write_that_nobody_reads_is_unknown(small: Box) -> None:
    record = await small.start("sleep 60")
    container = small.provider.engine.docker.containers.container(small.resource.resource_id)
    hasty = DockerHome(container, write_limit_s=0.5)
    try:
        outcome = await hasty.write(record.process_id, PAC[1], 1, b"x" * 131_072, False)
        again = await hasty.write(record.process_id, PAC[1], 1, b"x" * 131_072, False)
    finally:
        await hasty.close()
    assert again == outcome
    assert (outcome.state, outcome.reason_code) == ("unknown", "stdin_write_unknown")


async def test_an_interrupt_is_the_commands_to_handle(machine: Box) -> None:
    record = await machine.start("trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.1; done", 5.0)
    await machine.until_output(record.process_id, "ready")
    assert (await machine.home.signal(record.process_id, PAC[1], 1, "interrupt")).state == "applied"
    ended = await machine.end(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.state, ended.exit.exit_code) == ("failed", 5)
    plain = await machine.start("sleep 60")
    await machine.home.signal(plain.process_id, PAC[1], 1, "interrupt")
    ended = await machine.end(plain.process_id)
    assert ended.exit is not None
    assert (ended.exit.reason_code, ended.exit.exit_signal) == ("signal", "interrupt")


async def test_terminate_ends_also_what_ignores_it(machine: Box) -> None:
    record = await machine.start("trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & while :; do sleep 1; done")
    began = time.monotonic()
    assert (await machine.home.signal(record.process_id, PAC[1], 1, "terminate")).state == "applied"
    ended = await machine.end(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.state, ended.exit.reason_code, ended.exit.exit_code) == ("killed", "terminate_requested", None)
    assert 1.5 < time.monotonic() - began < 15
    again = await machine.home.signal(record.process_id, PAC[2], 2, "terminate")
    assert (again.state, again.reason_code) == ("failed", "process_terminal")


async def test_stop_is_recorded_with_its_reason(machine: Box) -> None:
    record = await machine.start("sleep 60")
    await machine.home.stop(record.process_id, "agent_archived")
    ended = await machine.end(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.state, ended.exit.reason_code) == ("unknown", "agent_archived")
    await machine.home.prepare(ProcessSpec(process_id=UNBORN, command="echo never"))
    await machine.home.stop(UNBORN, "agent_archived")
    never = await machine.home.execute(UNBORN, 1.0)
    assert never.exit is not None
    assert (never.exit.reason_code, never.output_end) == ("agent_archived", 0)


async def test_the_result_comes_with_the_shells_end_not_with_the_pipes(machine: Box) -> None:
    began = time.monotonic()
    record, output = await machine.run("sleep 600 & echo hi")
    assert output == "hi\n"
    assert record.exit is not None
    assert record.exit.exit_code == 0
    assert time.monotonic() - began < 15
    _, left = await machine.run("ps -o args 2>/dev/null | grep -c '[s]leep 600'")
    assert left.strip() in ("0", ""), "what stays in the group ends with it"
    began = time.monotonic()
    apart, _ = await machine.run("setsid sleep 40 & echo on")
    assert time.monotonic() - began < 20
    assert apart.exit is not None


async def test_a_timeout_ends_a_command(machine: Box) -> None:
    record, _ = await machine.run("sleep 60", timeout_seconds=1)
    assert record.exit is not None
    assert (record.exit.state, record.exit.reason_code) == ("failed", "timeout")


async def test_nothing_that_waited_is_left(machine: Box) -> None:
    """Each time limit that a command did not need, and each write, would take a process for as long."""
    for _ in range(3):
        await machine.run("true", timeout_seconds=601)
    reader = await machine.start("for n in 1 2 3 4 5; do read -r x; done", timeout_seconds=602)
    for number, action in enumerate(PAC, 1):
        await machine.home.write(reader.process_id, action, number, b"x\n", False)
    await machine.end(reader.process_id)
    deadline, left = time.monotonic() + 20, ""
    while left != "0\n" and time.monotonic() < deadline:
        _, left = await machine.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -cE 'sleep (60[12]|10) ' || true")
    assert left == "0\n"


async def test_a_terminal_where_there_is_script_and_a_reason_where_not(machine: Box) -> None:
    if machine.spec.config["image"] == BUSYBOX_IMAGE:
        with pytest.raises(StartFailed, match="script"):
            await machine.start("tty", io_mode="pty")
        return
    record = await machine.start("tty; stty size; read line; echo got $line; exit 4", 5.0, io_mode="pty")
    output = await machine.until_output(record.process_id, "24 80")
    assert output.startswith("/dev/pts/")
    refused = await machine.home.write(record.process_id, PAC[1], 1, b"nothing of this\n", True)
    assert (refused.state, refused.reason_code) == ("failed", "close_stdin_unsupported")
    assert await machine.home.write(record.process_id, PAC[1], 1, b"nothing of this\n", True) == refused
    assert (await machine.home.write(record.process_id, PAC[2], 2, b"words\n", False)).state == "applied"
    await machine.until_output(record.process_id, "got words")
    ended = await machine.end(record.process_id)
    assert ended.exit is not None
    assert (ended.exit.state, ended.exit.exit_code) == ("failed", 4)


async def test_twenty_at_once_each_run_once(machine: Box) -> None:
    results = await asyncio.gather(*(machine.run(f"echo {number} >>counted; echo {number}") for number in range(20)))
    assert sorted(int(output) for _, output in results) == list(range(20))
    _, counted = await machine.run("cat counted; rm counted")
    assert sorted(int(line) for line in counted.split()) == list(range(20))


async def test_a_command_is_never_executed_twice(machine: Box) -> None:
    await machine.home.prepare(ProcessSpec(process_id=ONCE, command="echo run >>once; sleep 0.2"))
    await asyncio.gather(*(machine.home.execute(ONCE, 1.0) for _ in range(5)))
    await machine.home.prepare(ProcessSpec(process_id=ONCE, command="echo again >>once"))
    await machine.home.execute(ONCE, 1.0)
    await machine.end(ONCE)
    _, once = await machine.run("cat once; rm once")
    assert once == "run\n"


async def test_another_home_finds_everything_and_the_older_line_is_cut(machine: Box) -> None:
    record = await machine.start("echo begun; read line; echo $line", 5.0)
    await machine.home.acknowledge(record.process_id, "started")
    other = await machine.provider.open_home(machine.spec, machine.resource.resource_id)
    try:
        found = {each.process_id: each for each in await other.processes()}
        mine = found[record.process_id]
        assert (mine.phase, mine.supervisor_live, mine.started_acknowledged) == ("accepted", True, True)
        assert mine.supervisor_id == record.supervisor_id
        assert (await other.write(record.process_id, PAC[1], 1, b"done\n", False)).state == "applied"
        ended = await other.watch(record.process_id, ENDLESS, 5.0)
        assert ended.exit is not None
        assert (await other.read(record.process_id, 0, 100)).data == b"begun\ndone\n"
    finally:
        await other.close()
    # The older home opens a line again when it is asked for something.
    assert (await machine.end(record.process_id)).exit is not None


async def test_a_command_that_kills_our_shells_harms_only_itself(small: Box) -> None:
    victim = await small.start("sleep 60")
    record = await small.start("kill -9 $(ps -o pid,args | grep 'eva[l]' | awk '{print $1}'); echo survived", 1.0)
    found = {each.process_id: each for each in await small.home.processes()}
    assert found[victim.process_id].exit is None
    assert not found[victim.process_id].supervisor_live, "nobody can tell how it ends"
    assert record.process_id in found
    _, output = await small.run("echo still here")
    assert output == "still here\n"


async def test_reads_of_output_that_is_dropped_and_beyond_its_end(small: Box) -> None:
    record = await small.start("dd if=/dev/zero bs=1000000 count=200 2>/dev/null; echo end", 0.1)
    ended = await small.end(record.process_id, 60)
    assert ended.output_end == 200_000_004
    assert 100 * 2**20 <= ended.output_end - ended.output_start <= 133 * 2**20
    first = await small.read(record.process_id)
    assert first.dropped
    assert first.cursor == ended.output_start
    last = await small.home.read(record.process_id, ended.output_end - 4, 100)
    assert (last.data, last.next_cursor, last.dropped, last.closed) == (b"end\n", ended.output_end, False, True)
    beyond = await small.home.read(record.process_id, ended.output_end + 99, 100)
    assert (beyond.data, beyond.cursor) == (b"", ended.output_end)
    across = await small.home.read(record.process_id, ended.output_start + 4 * 2**20 - 10, 1000)
    assert across.data == bytes(1000)
    await small.home.forget(record.process_id)
    assert await small.home.processes() == []
    with pytest.raises(HomeLost):
        await small.home.watch(record.process_id, 0, 0.1)


async def test_output_without_an_end_stays_bounded(machine: Box) -> None:
    if machine.spec.config["image"] == BUSYBOX_IMAGE:
        return  # its `cat` takes 8 s for it
    record = await machine.start("cat /dev/zero", 0.1)
    async with asyncio.timeout(60):
        while (now := await machine.home.watch(record.process_id, ENDLESS, 0.2)).output_end < 1_000_000_000:
            assert now.output_end - now.output_start < 140 * 2**20
    _, used = await machine.run("du -sm /home/.omnara | cut -f1")
    assert int(used) < 150
    await machine.home.signal(record.process_id, PAC[1], 1, "terminate")
    assert (await machine.end(record.process_id)).exit is not None
    await machine.home.forget(record.process_id)


async def test_names_that_a_shell_may_not_be_given(small: Box) -> None:
    home: DockerHome = small.home
    for name in ("../x", "a b", "$(id)", "", "*", "-n"):
        with pytest.raises(ValueError, match="name"):
            await home.forget(name)


async def test_what_an_agent_writes_among_our_records_is_passed_over(small: Box) -> None:
    real, _ = await small.run("echo real")
    await small.run(
        "cd /home/.omnara && mkdir 'a b' evil prc_short $(printf 'n\\nl') && cp -r prc_short/. evil;"
        f"mkdir -p {new_id()}/bit && echo garbage in many words here >{new_id()}; echo x y z >evil/spec;"
        f"d={new_id()}; mkdir -p $d/bit $d/act/bad $d/out; echo s 1 pipe 0 . >$d/spec; echo kind x >$d/act/bad/k;"
        "echo not an exit . >$d/exit"
    )
    found = await small.home.processes()
    assert real.process_id in {each.process_id for each in found}
    assert len(found) <= 3
    assert (await small.run("echo on"))[1] == "on\n"


async def test_output_of_a_name_that_is_no_place_is_not_seen(small: Box) -> None:
    real, _ = await small.run("echo real")
    out = f"/home/.omnara/{real.process_id}/out"
    await small.run(f"cd {out}; echo forged >99999999999999999999; echo forged >aaaaaaaaaaaaaaaa; echo forged >9")
    assert (await small.read(real.process_id)).data == b"real\n"
    [again] = [each for each in await small.home.processes() if each.process_id == real.process_id]
    assert (again.output_start, again.output_end) == (0, 5)


async def test_pipes_in_the_place_of_records_hold_up_nobody(small: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    real, _ = await small.run("echo real")
    forged = f"cd /home/.omnara/{real.process_id}; rm spec exit; mkfifo spec; ln -s /dev/zero exit; echo forged"
    assert (await small.run(forged))[1] == "forged\n"
    with monkeypatch.context() as patch:
        patch.setattr(channel, "REQUEST_S", 2.0)
        async with asyncio.timeout(20):
            assert real.process_id not in {each.process_id for each in await small.home.processes()}
    assert (await small.run("echo on"))[1] == "on\n"


async def test_a_container_that_shuts_its_records_away_is_lost_and_not_full(small: Box) -> None:
    shut = "chmod 000 /home/.omnara; p=$(cut -d' ' -f1 /run/omnara/serve); chmod 000 /run/omnara; kill -9 $p"
    with contextlib.suppress(HomeLost):
        await small.run(shut)
    with pytest.raises(HomeLost):
        await small.home.processes()


async def test_forged_answers_are_lost_lines_and_nothing_worse(small: Box) -> None:
    command = "for p in /proc/[0-9]*; do grep -q omnara $p/cmdline && echo 'p forged' >$p/fd/1; done 2>/dev/null; true"
    for _ in range(3):
        try:
            await small.run(command)
        except HomeLost:
            continue
    assert (await small.run("echo well"))[1] == "well\n"


async def test_a_full_memory_disk_is_told_as_that(small: Box) -> None:
    await small.run("dd if=/dev/zero of=/run/omnara/fill bs=1M count=65 2>/dev/null; true")
    for _ in range(2):
        with pytest.raises(HomeFull):
            await small.start(f"echo never # {'x' * 100_000}")
    assert len(await small.home.processes()) == 1
