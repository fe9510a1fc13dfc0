"""On PYTHONPATH of every process of a lesson: no network beyond loopback, bounded memory.

Lessons must run offline once they are set up, and a lesson that allocates without end must not
take the machine with it. What was refused is also written to a file, for a lesson that swallows
the error.
"""

import os
import resource
import sys

ADDRESS_SPACE = 16 << 30  # bytes; importing a CUDA build of torch maps some 7 GB of libraries
LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0", "::ffff:127.")


def _refuse(what: str) -> None:
    with open(os.environ["COURSE_NETWORK_LOG"], "a", encoding="utf-8") as log:
        log.write(what + "\n")
    raise PermissionError(f"network use in a lesson: {what} (only loopback is allowed)")


def _watch(event: str, arguments: tuple) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            _refuse(f"{event} to {address[0]}:{address[1]}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
        host = host.decode() if isinstance(host, bytes) else host
        own = (None, "", os.uname().nodename)
        if host not in own and not str(host).startswith(LOOPBACK):
            _refuse(f"{event} of {host}")


if "COURSE_NETWORK_LOG" in os.environ:
    sys.addaudithook(_watch)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
