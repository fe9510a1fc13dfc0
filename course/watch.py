"""Watch the processes of one lesson run: memory, what is left behind, and ending them all."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil

MARK = "COURSE_RUN"  # environment variable that every process of a run inherits
HELPERS = ("resource_tracker",)  # started by Python itself; ends with its parent
SCRATCH = "course-"  # start of the name of a run's folder in the temp directory


def new_mark() -> str:
    """A name for what a build starts, that says which build that is: a value of `MARK`."""
    return f"{os.getpid()}-{uuid.uuid4().hex}"


def new_scratch() -> Path:
    """An empty folder for one run, in the temp directory, named after this build."""
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))


def sweep(cache_folder: Path) -> None:
    """Remove what builds that were killed have left: processes, scratch folders, half a site."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.environ().get(MARK, "")
            if mark and _build_is_gone(mark):
                process.kill()
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}[0-9]*-*"):
        if _build_is_gone(folder.name.removeprefix(SCRATCH)):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in cache_folder.glob("site-[0-9]*"):
        if _build_is_gone(folder.name.removeprefix("site-")):
            shutil.rmtree(folder, ignore_errors=True)
    for file in [*cache_folder.glob("*.part"), *cache_folder.glob("*/*.part")]:
        if _build_is_gone(file.name.split(".")[-3]):
            file.unlink(missing_ok=True)


def leftovers() -> set[str]:
    """What runs of this build have left by now, in words: nothing, between two runs."""
    mine = f"{os.getpid()}-"
    found = {f"/dev/shm/{name}" for name in shared_memory_files() - mapped_shared_memory()}
    found |= {str(path) for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{mine}*")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(mine):
                found.add(f"process {process.pid}: {' '.join(process.cmdline())[:90]}")
    return found


def _build_is_gone(name: str) -> bool:
    """Whether the build that made `name`, which begins with its process number, has ended."""
    number = name.partition("-")[0]
    return number.isdigit() and not psutil.pid_exists(int(number))


class Watch:
    """The processes of one run, found by kernel pid and by the mark in their environment."""

    def __init__(self, mark: str, kernel_pid: int) -> None:
        self.mark = mark
        self.kernel = psutil.Process(kernel_pid)
        self.peak_bytes = 0
        self.cpu_seconds = 0.0
        self.next_exact = 0.0  # when to ask for exact memory again
        self.next_doors = 0.0  # when to look for listening sockets again
        self.exposed: set[str] = set()  # addresses that were open to other machines
        self.own_ports = {port for _, _, port in self._listening()}  # the kernel's debugger

    def sample(self) -> None:
        """Look at memory, CPU time and listening sockets; `peak_bytes` follows within seconds."""
        processes = [self.kernel, *self._children()]
        with contextlib.suppress(psutil.Error):
            self.cpu_seconds = sum(self.kernel.cpu_times()[:4])
        resident = sum(map(_resident, processes))  # counts what several share several times
        began = time.monotonic()
        if resident > self.peak_bytes and began > self.next_exact:
            self.peak_bytes = max(self.peak_bytes, sum(map(_exact, processes)))
            # The exact figure costs some milliseconds a process: a twentieth of the time at most.
            self.next_exact = began + max(0.5, 20 * (time.monotonic() - began))

        if time.monotonic() > self.next_doors:
            began = time.monotonic()
            self.exposed |= {
                f"{ip}:{port}" for process in processes for _, ip, port in _doors(process)
                if not ip.startswith("127.") and ip != "::1"
            }  # fmt: skip
            self.next_doors = began + max(0.5, 20 * (time.monotonic() - began))

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return self.kernel.children(recursive=True)
        return []

    def left_running(self) -> list[str]:
        """What still runs or listens after the last cell, in words."""
        children: Counter[str] = Counter()
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if process.pid != self.kernel.pid:
                    if not any(helper in command for helper in HELPERS):
                        children[command[:90]] += 1
        found = [
            f"child process left behind{f' ({number} of them)' if number > 1 else ''}: {command}"
            for command, number in children.items()
        ]
        for ip, port in sorted({(ip, port) for _, ip, port in self._listening()}):
            if port not in self.own_ports:
                found.append(f"port left behind: something still listens on {ip}:{port}")
        for address in sorted(self.exposed):
            found.append(
                f"open to other machines: something listened on {address}; "
                "bind 127.0.0.1 (a TCPStore: master_listen_fd of a socket on 127.0.0.1)"
            )
        return found

    def _listening(self) -> list[tuple[int, str, int]]:
        """(pid, address, port) of every TCP socket of the run that listens."""
        return [door for process in self.marked() for door in _doors(process)]

    def marked(self) -> list[psutil.Process]:
        """All living processes of this run, also those that left the kernel's process group."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def end(self) -> None:
        """SIGKILL to every process of the run, until none is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.kernel.pid, signal.SIGKILL)
        for _ in range(50):
            alive = self.marked()
            if not alive:
                return
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)


def _doors(process: psutil.Process) -> list[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket on which a process listens."""
    with contextlib.suppress(psutil.Error):
        connections = process.net_connections("tcp")
        return [(process.pid, *c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]
    return []


def _resident(process: psutil.Process) -> int:
    """Bytes of memory of a process, shared ones included; 0 where it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _exact(process: psutil.Process) -> int:
    """Bytes of memory of a process; what several share is divided among them (PSS)."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return getattr(memory, "pss", 0) or memory.uss
    return 0


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, where the system has it."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def mapped_shared_memory() -> set[str]:
    """Names in /dev/shm that a living process has mapped: in use, not left behind."""
    names = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    names.add(line.split("/dev/shm/")[1].removesuffix(" (deleted)"))
    return names
