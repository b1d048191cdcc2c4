"""What a process of the fork server does with a job: gets everything ready, waits for the word, and is its keeper.

Until the word comes nothing is held and nothing has happened: any number may be ready for one command, and go again.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from . import files
from .keep import Keeper
from .talk import Connection

__all__ = ["do"]


def do(directory: int, first: socket.socket) -> None:
    """Run the command of an open process directory, unless somebody did. Returns when all is over and written down.

    `first` is the connection of whoever wants it run. They may say `ready`, with the sandbox that it will run in, and a
    process waits there; the next request is the word. A hang-up before that ends it all. After it they hear
    `committed` (or `full`: nothing was begun), and then their answer.
    """
    os.fchdir(directory)
    launch = files.read_json(directory, files.LAUNCH)
    if launch is None:
        return
    connection = Connection(first)
    keeper = Keeper(directory, launch)
    asked = _asked(connection)
    if asked is not None and asked["op"] == "ready":
        keeper.fork_ahead(asked.get("sandbox"))
        asked = _asked(connection, keeper)
    if asked is not None and _begun(directory, keeper, connection):
        keeper.run(connection, asked)
    else:
        keeper.leave()


def _asked(connection: Connection, ready: Keeper | None = None) -> dict[str, Any] | None:
    """Wait for the next request, for as long as it takes. None: whoever would have asked is gone.

    What `ready` has forked ahead may die meanwhile, and is not left as a zombie.
    """
    waiting = select.poll()
    waiting.register(connection.socket, select.POLLIN)
    if ready is not None:
        waiting.register(ready.children, select.POLLIN)
    while connection.open:
        asked = connection.receive()
        if asked is not None:
            return asked[0]
        heard = {fd for fd, _ in waiting.poll()} if connection.open else set()
        if ready is not None and ready.children in heard:
            os.read(ready.children, 4096)
            ready.look_ahead()
    return None


def _begun(directory: int, keeper: Keeper, connection: Connection) -> bool:
    """Take the lock and the execution bit, and say so. False: it is somebody else's command, or there is no room."""
    if not _locked(directory):
        return False
    try:
        keeper.commit()
    except FileExistsError:
        return False
    except OSError as error:
        if not files.is_full(error):
            raise
        connection.answer({"event": "full"})
        return False
    connection.tell({"event": "committed"})
    return True


def _locked(directory: int) -> bool:
    """Take the lock for as long as this process lives, giving way to those who only look whether it is held.

    False: another keeper has it, or the process was forgotten. A look is over in microseconds, so after a second of
    them (200 x 0.005 s) it is no look.
    """
    for _ in range(200):
        try:
            if files.try_lock(directory) is not None:
                return True
        except FileNotFoundError:
            return False
        if files.read_bit(directory) is not None:
            return False
        time.sleep(0.005)
    return False
