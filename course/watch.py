"""Watch the processes of one lesson run: memory, what is left behind, and ending them all."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

MARK = "COURSE_RUN"  # environment variable that every process of a run inherits
HELPERS = ("resource_tracker",)  # started by Python itself; ends with its parent


class Watch:
    """The processes of one run, found by kernel pid and by the mark in their environment."""

    def __init__(self, mark: str, kernel_pid: int) -> None:
        self.mark = mark
        self.kernel = psutil.Process(kernel_pid)
        self.peak_bytes = 0
        self.cpu_seconds = 0.0
        self.own_ports = {port for _, _, port in self._listening()}  # the kernel's debugger

    def sample(self) -> int:
        """Bytes of memory that the kernel and its children use now; remembers the peak."""
        total = 0
        for process in [self.kernel, *self._children()]:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", 0) or memory.uss
        with contextlib.suppress(psutil.Error):
            self.cpu_seconds = sum(self.kernel.cpu_times()[:4])
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return self.kernel.children(recursive=True)
        return []

    def left_running(self) -> list[str]:
        """What still runs or listens after the last cell, in words."""
        found = []
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if process.pid != self.kernel.pid:
                    if not any(helper in command for helper in HELPERS):
                        found.append(f"child process left behind: {command[:90]}")
        for ip, port in sorted({(ip, port) for _, ip, port in self._listening()}):
            if port not in self.own_ports:
                found.append(f"port left behind: something still listens on {ip}:{port}")
        return found

    def _listening(self) -> list[tuple[int, str, int]]:
        """(pid, address, port) of every TCP socket of the run that listens."""
        found = []
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append((process.pid, *connection.laddr))
        return found

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
