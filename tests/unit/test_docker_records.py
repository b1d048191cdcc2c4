"""What comes out of a container is read without trust, and what goes in is quoted; no engine is needed for either."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from aiodocker.exceptions import DockerError
from aiodocker.stream import Message
from hypothesis import given
from hypothesis import strategies as st

import omnara.machines.docker.channel as channel
from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.docker import launchscript
from omnara.machines.docker.home import DockerHome
from omnara.machines.docker.launchscript import launch_script
from omnara.machines.docker.records import Reply, actions_of, process_of, processes_of, slice_of
from omnara.machines.processes import HomeLost, ProcessSpec
from tests.support.waiting import until

# Fixed: names of tests contain them, and all processes that run tests must agree on those.
PRC, PAC = encode(IdKind.PROCESS, UUID(int=1)), encode(IdKind.PROCESS_ACTION, UUID(int=2))
RECORD = (
    f"p {PRC} sup 5 1 1 0 1000000 0 42 sx",
    "x failed nonzero_exit 2 - 1000000 2500000",
    f"a {PAC} write 1 applied - 1",
    f"e {PRC}",
)
SHIM = Path(channel.__file__).with_name("shim.sh")


def test_a_record() -> None:
    record = process_of(Reply(RECORD), PRC)
    assert (record.phase, record.output_end, record.started_acknowledged, record.exit_acknowledged) == (
        "terminal", 42, True, True,
    )  # fmt: skip
    assert record.exit is not None
    assert (record.exit.state, record.exit.exit_code) == ("failed", 2)
    assert (record.exit.started_at, record.exit.ended_at) == (
        "1970-01-01T00:00:01.000000Z",
        "1970-01-01T00:00:02.500000Z",
    )
    assert [action.action_id for action in record.actions] == [PAC]


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=60), max_size=8))
def test_nonsense_is_lost_or_passed_over(lines: list[str]) -> None:
    reply = Reply(tuple(lines))
    assert processes_of(reply) == []
    for read in (lambda: process_of(reply, PRC), lambda: actions_of(reply), lambda: slice_of(reply, 0)):
        try:
            read()
        except HomeLost:
            continue


@given(st.integers(0, len(RECORD) - 1), st.integers(0, 10), st.text(st.characters(codec="ascii"), max_size=20))
def test_a_damaged_record_is_none_or_a_whole_one(line: int, word: int, text: str) -> None:
    words = RECORD[line].split(" ")
    words[min(word, len(words) - 1)] = text
    damaged = Reply((*RECORD[:line], " ".join(words), *RECORD[line + 1 :]))
    for record in processes_of(damaged):
        assert record.exit is None or record.exit.state in ("exited", "failed", "killed", "unknown")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (0, f"p {PRC} sup 5 1 1 0 1000000 0 99999999999999999999 sx"),
        (0, f"p {PRC} sup 5 1 1 0 1000000 -1 42 sx"),
        (1, "x exited - 99999999999 - 1000000 2500000"),
        (1, "x exited - 0 - 2500000 1000000"),
        (2, f"a {PAC} write 99999999999999999999 applied - 1"),
    ],
    ids=["end", "start", "code", "time", "seq"],
)
def test_numbers_that_no_server_takes_make_no_record(line: int, words: str) -> None:
    """One that was told would be refused, and its command waited for."""
    forged = Reply((*RECORD[:line], words, *RECORD[line + 1 :]))
    assert processes_of(forged) == []
    with pytest.raises(HomeLost):
        process_of(forged, PRC)


def test_a_record_of_another_process_is_not_taken() -> None:
    with pytest.raises(HomeLost):
        process_of(Reply(RECORD), encode(IdKind.PROCESS, new_uuid()))


@given(st.data())
def test_answers_are_the_same_however_they_are_cut(data: st.DataObject) -> None:
    body = data.draw(st.binary(max_size=50))
    whole = b"one\n.\n" + b"d 0 9 0 1 %d\n" % len(body) + body + b".\nlast\n.\n"
    parser, found, at = channel._Parser(), list[Reply](), 0
    while at < len(whole):
        size = data.draw(st.integers(1, len(whole) - at))
        found += parser.replies(whole[at : at + size])
        at += size
    assert [reply.lines for reply in found] == [("one",), (f"d 0 9 0 1 {len(body)}",), ("last",)]
    assert found[1].data == body


def test_answers_without_an_end_are_given_up() -> None:
    with pytest.raises(ValueError, match="without an end"):
        channel._Parser().replies(b"x" * (channel.MAX_REPLY + 1))
    with pytest.raises(ValueError, match="without an end"):
        channel._Parser().tidings(b"x" * (channel.MAX_TIDING + 1))
    with pytest.raises(ValueError, match="without an end"):
        channel._Parser().replies(b"\n" * (channel.MAX_LINES + 1))


class Talker:
    """A container's side of a line: what it says is ready to be read at once, as long as there is some."""

    def __init__(self, *said: Message, answer: bytes | None = None) -> None:
        self.said = list(said)
        self.taken = 0
        self.closed = False
        self._answer = answer
        self._asked = asyncio.Event()

    async def read_out(self) -> Message | None:
        if self._answer is not None and not self.said:
            await self._asked.wait()
            self.said, self._answer = [Message(1, self._answer)], None
        if not self.said:
            await asyncio.Event().wait()
        self.taken += 1
        return self.said.pop(0)

    async def write_in(self, data: bytes) -> None:
        self._asked.set()

    async def close(self) -> None:
        self.said.clear()
        self.closed = True


async def line_to(talker: Talker, heard: list[str]) -> channel.Channel:
    return channel.Channel(talker, heard.append, lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [b"p forged\n.\n", b"the beginning of the next answer", b".\n" * 30_000])
async def test_a_line_that_speaks_without_being_asked_is_closed(said: bytes) -> None:
    line = await line_to(Talker(*[Message(1, said)] * 1000), [])
    await until(lambda: line.closed, "the line is closed")
    with pytest.raises(HomeLost):
        await line.request("list -")
    await line.close()


class Unreachable:
    """A container whose engine refuses the upgrade of an exec; it is the exec and its stream as well."""

    closed = False

    async def exec(self, *_: object, **__: object) -> Unreachable:
        return self

    def start(self, *, detach: bool) -> Unreachable:
        return self

    async def __aenter__(self) -> None:
        raise DockerError(500, "cannot upgrade")

    async def close(self) -> None:
        self.closed = True
        raise AssertionError


async def test_a_stream_that_never_came_about_is_closed() -> None:
    container = Unreachable()
    with pytest.raises(HomeLost):
        await channel.Channel.open(container, print, lambda: None, 1.0)  # type: ignore[arg-type]
    assert container.closed


async def test_a_line_is_closed_by_whoever_is_canceled_meanwhile() -> None:
    talker = Talker()
    line = await line_to(talker, [])
    closing = asyncio.ensure_future(line.close())
    await asyncio.sleep(0)
    assert not talker.closed, "it waits for its reader"
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert talker.closed


async def test_a_line_that_comes_about_after_its_home_was_closed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    talker, opening, go = Talker(), asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> channel.Channel:
        opening.set()
        await go.wait()
        return await line_to(talker, [])

    monkeypatch.setattr(channel.Channel, "open", slowly)
    home = DockerHome(Unreachable())  # type: ignore[arg-type]
    asked = asyncio.ensure_future(home.processes())
    await opening.wait()
    await home.close()
    go.set()
    with pytest.raises(HomeLost, match="let go of"):
        await asked
    assert talker.closed


async def test_one_question_has_one_answer() -> None:
    line = await line_to(Talker(answer=b"one\n.\ntwo\n.\n"), [])
    assert (await line.request("list -")).lines == ("one",)
    assert line.closed
    await line.close()


async def test_a_machine_that_shouts_waits_and_not_the_server() -> None:
    news, heard = Message(2, b"out prc_x\n" * 6000), list[str]()
    talker = Talker(*[news] * 1000)
    began = asyncio.get_running_loop().time()
    line = await line_to(talker, heard)
    await asyncio.sleep(0.2)  # the loop turns at all: nothing of what is said ever has to be waited for
    worth = channel.NEWS_PER_S / len(news.data)
    passed = asyncio.get_running_loop().time() - began
    assert 2 <= talker.taken <= (1 + passed) * worth + 2, "a second's worth, and what came in a fifth of one"
    assert not line.closed
    assert len(heard) == talker.taken, "the same news in one piece is one"
    await line.close()


@pytest.mark.parametrize("shell", [["dash"], ["bash", "--posix"], ["busybox", "ash"]], ids=lambda shell: shell[0])
def test_every_shell_can_read_the_shim(shell: list[str]) -> None:
    try:
        checked = subprocess.run([*shell, "-n", str(SHIM)], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{shell[0]} is not installed")
    assert (checked.returncode, checked.stderr) == (0, b"")


@pytest.mark.parametrize("text", ["it's", "'", "''", "a\nb", "$(id) `id` $HOME \\", "-n", "", "ünïcode", "a'\"b"])
def test_commands_and_variables_arrive_as_they_are(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DURABLE", "TRANSIENT"):
        monkeypatch.setattr(launchscript, name, str(tmp_path / name))
    (tmp_path / "TRANSIENT" / "p" / PRC).mkdir(parents=True)
    (tmp_path / "TRANSIENT" / "boot").write_text("run\n")
    spec = ProcessSpec(process_id=PRC, command=f"printf %s \"$V\"; : '{text.replace(chr(39), '')}'", env={"V": text})
    script = tmp_path / "go"
    script.write_bytes(launch_script(spec, "/", {}))
    done = subprocess.run(["/bin/sh", str(script)], capture_output=True, check=False)
    assert (done.stdout.decode(), done.stderr) == (text, b"")
