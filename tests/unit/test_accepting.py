"""A server without files for its connections says so in a line, loses none of them and continues."""

from __future__ import annotations

import subprocess
import sys

# More connections at once than the process may have files open, to a server as a generator's is; each is answered, and
# closed by who has asked, which makes room for the next.
FLOOD = """
import asyncio, errno, resource, socket, sys
from inflight.generator.accepting import AcceptErrors

CONNECTIONS = 200

async def answer(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    await reader.read()
    writer.close()

def ask_all(port):
    # In a process of its own: its files are not the server's.
    import os, time
    child = os.fork()
    if child:
        return child
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        asked = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(CONNECTIONS)]
        time.sleep(2.5)  # the server tries again each second
        for each in asked:
            each.sendall(b"hello\\n")
        for each in asked:
            assert each.makefile("rb").readline() == b"hello\\n"
            each.close()
        os._exit(0)
    finally:
        os._exit(1)

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    child = ask_all(server.sockets[0].getsockname()[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
    import os
    done, status = await asyncio.to_thread(os.waitpid, child, 0)
    print("all answered" if status == 0 else f"status {status}")
    loop.call_exception_handler({"message": "something else"})

asyncio.run(main())
"""


def test_a_flood_of_connections_is_one_line() -> None:
    """By asyncio alone it is thousands."""
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "all answered\n"
    said, *other = done.stderr.splitlines()
    assert said.startswith(
        "connections wait, 1 so far could not be accepted: Too many open files (this process may have "
    )
    assert other == ["something else"]
