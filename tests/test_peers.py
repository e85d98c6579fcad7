"""Who is at the other end, and whether that process still lives: with real processes and pidfds."""

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from snapd import peers
from snapd.peers import Peer, ProcessWatch, open_pidfd, peer_of


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        yield one, other


class Child:
    """A process that lives until it is told to end, and that has connected to us."""

    def __init__(self, listener: socket.socket) -> None:
        script = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "print(flush=True); sys.stdin.read()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", script, listener.getsockname()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.sock, _ = listener.accept()
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.peer = peer_of(self.sock)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def new_child(tmp_path: object) -> Iterator[Callable[[], Child]]:
    children: list[Child] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()

        def start() -> Child:
            children.append(Child(listener))
            return children[-1]

        yield start
    for child in children:
        child.end()
        child.sock.close()


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def run(scene: Callable[[asyncio.AbstractEventLoop], object]) -> None:
    async def on_loop() -> None:
        await scene(asyncio.get_running_loop())  # type: ignore[misc]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(on_loop())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.001)


def test_a_peer_is_named_by_process_and_user(pair: tuple[socket.socket, socket.socket]) -> None:
    assert peer_of(pair[0]) == Peer(pid=os.getpid(), uid=os.geteuid())


def test_a_pidfd_of_a_living_peer_becomes_readable_when_it_exits(new_child: Callable[[], Child]) -> None:
    child = new_child()
    pidfd = open_pidfd(child.sock, child.peer)
    assert pidfd is not None
    assert select.select([pidfd], [], [], 0)[0] == []
    child.end()
    assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    os.close(pidfd)


def test_without_so_peerpidfd_the_pid_is_used(
    monkeypatch: pytest.MonkeyPatch, new_child: Callable[[], Child]
) -> None:
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9_999)
    child = new_child()
    pidfd = open_pidfd(child.sock, child.peer)
    assert pidfd is not None
    os.close(pidfd)


def test_a_process_that_is_gone_has_no_pidfd_by_its_number(
    monkeypatch: pytest.MonkeyPatch, new_child: Callable[[], Child]
) -> None:
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9_999)
    child = new_child()
    child.end()
    assert open_pidfd(child.sock, child.peer) is None


def test_a_pid_is_not_trusted_when_the_kernel_could_tell_the_peer_and_does_not() -> None:
    """Linux 6.5 to 6.15 answers so for a peer that is gone; its pid may be another's by now."""

    class Gone:
        def getsockopt(self, level: int, option: int) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    assert open_pidfd(Gone(), Peer(os.getpid(), 0)) is None  # type: ignore[arg-type]


def test_a_process_that_is_gone_is_not_taken_for_whoever_asks_over_its_connection(
    new_child: Callable[[], Child],
) -> None:
    """Be it known already or not: the exit of one process proves nothing about another."""

    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        gone: list[int] = []
        watch = ProcessWatch(loop, gone.append, lambda writer_id: True, 10)
        known, unknown = new_child(), new_child()
        assert watch.writer_id(known.sock, known.peer) == 1
        known.end()
        unknown.end()
        before = num_fds()
        # The loop has not heard of the exit yet.
        assert [watch.writer_id(child.sock, child.peer) for child in (known, unknown)] == [0, 0]
        assert num_fds() == before
        await until(lambda: gone)
        assert gone == [1] and len(watch) == 0

    run(scene)


def test_a_peer_of_another_pid_namespace_cannot_be_watched(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel gives 0 for its pid."""
    assert open_pidfd(pair[0], Peer(0, 0)) is None


def test_an_exit_is_told_once_and_the_process_is_forgotten(new_child: Callable[[], Child]) -> None:
    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        gone: list[int] = []
        watch = ProcessWatch(loop, gone.append, lambda writer_id: True, 10)
        first, second = new_child(), new_child()
        before = num_fds()
        ids = [watch.writer_id(child.sock, child.peer) for child in (first, second)]
        assert ids[0] != ids[1] and 0 not in ids
        assert len(watch) == 2
        first.end()
        await until(lambda: gone)
        assert (gone, len(watch)) == ([ids[0]], 1)
        second.end()
        await until(lambda: len(gone) == 2)
        assert (gone, len(watch)) == (ids, 0)
        assert num_fds() <= before - 4, "its pidfd and both pipes of each child are closed"

    run(scene)


def test_a_process_has_one_id_however_often_it_connects(new_child: Callable[[], Child]) -> None:
    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        watch = ProcessWatch(loop, lambda writer_id: None, lambda writer_id: False, 10)
        child = new_child()
        before = num_fds()
        ids = {watch.writer_id(child.sock, child.peer) for _ in range(5)}
        assert len(ids) == 1 and len(watch) == 1
        assert num_fds() == before + 1
        watch.close()
        assert num_fds() == before

    run(scene)


def test_a_process_that_cannot_be_watched_has_id_0(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        watch = ProcessWatch(loop, lambda writer_id: None, lambda writer_id: False, 10)
        assert watch.writer_id(pair[0], Peer(0, 0)) == 0
        assert len(watch) == 0

    run(scene)


def test_over_the_limit_idle_processes_are_forgotten_and_needed_ones_are_not(
    new_child: Callable[[], Child],
) -> None:
    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        gone: list[int] = []
        needed: set[int] = set()
        watch = ProcessWatch(loop, gone.append, needed.__contains__, 2)
        children = [new_child() for _ in range(4)]
        first, second = (watch.writer_id(child.sock, child.peer) for child in children[:2])
        needed |= {first, second}
        assert watch.writer_id(children[2].sock, children[2].peer) == 0, "all places are needed"
        assert watch.writer_id(children[0].sock, children[0].peer) == first
        needed.remove(first)
        third = watch.writer_id(children[2].sock, children[2].peer)
        assert third not in (0, first, second)
        assert len(watch) == 2
        children[0].end()
        children[1].end()
        await until(lambda: gone)
        assert gone == [second], "nobody is told of one that was forgotten"
        watch.close()

    run(scene)


def test_after_close_no_exit_is_told(new_child: Callable[[], Child]) -> None:
    async def scene(loop: asyncio.AbstractEventLoop) -> None:
        gone: list[int] = []
        watch = ProcessWatch(loop, gone.append, lambda writer_id: True, 10)
        child, other = new_child(), new_child()
        watch.writer_id(child.sock, child.peer)
        watch.close()
        assert len(watch) == 0
        witness = ProcessWatch(loop, gone.append, lambda writer_id: True, 10)
        child.end()
        assert witness.writer_id(other.sock, other.peer) == 1
        other.end()
        await until(lambda: gone)
        assert gone == [1]

    run(scene)
