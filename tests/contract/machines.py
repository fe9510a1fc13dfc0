"""Three machines, as network namespaces with addresses of their own: lose one, take it back in.

Run by test_launch.py as `unshare --net --mount python machines.py FOLDER`, where FOLDER holds
elastic.py and torchrun.sh. All namespaces and processes end with this one. Prints what each
machine printed, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MACHINES = 3


def connect_machines() -> None:
    """Make a network namespace for each machine, and a bridge between them."""
    Path("/run/netns").mkdir(exist_ok=True)
    commands = ["mount -t tmpfs none /run/netns", "ip link add br0 type bridge"]
    commands += ["ip link set br0 up"]
    for i in range(MACHINES):
        commands += [
            f"ip netns add m{i}",
            f"ip link add v{i} type veth peer name eth0 netns m{i}",
            f"ip link set v{i} master br0 up",
            f"ip -n m{i} addr add 10.77.0.{i + 1}/24 dev eth0",
            f"ip -n m{i} link set eth0 up",
            f"ip -n m{i} link set lo up",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True)


class Machine:
    """One torchrun.sh in one namespace, and what it printed."""

    def __init__(self, number: int, folder: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", f"m{number}", "bash", f"{folder}/torchrun.sh"]
            + ["--steps", "600", "--pause", "0.05"],
            env={
                **os.environ,
                "FIRST": "10.77.0.1",
                "NODES": str(MACHINES),
                "NODE_RANK": str(number),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.lines.extend(self.process.stdout)

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Wait until a line holds `text`. Raises TimeoutError with all lines otherwise."""
        end = time.monotonic() + seconds
        while not any(text in line for line in self.lines):
            if time.monotonic() > end:
                raise TimeoutError(f"no {text!r} in:\n" + "".join(self.lines))
            time.sleep(0.05)

    def kill_training(self) -> None:
        """SIGKILL to the training process of this machine, not to its torchrun."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        os.kill(int(listed.stdout.split()[0]), signal.SIGKILL)


def main(folder: str) -> None:
    """Run the story, and print each machine's lines as JSON."""
    connect_machines()
    machines = [Machine(number, folder) for number in range(MACHINES)]
    for machine in machines:
        machine.wait_for("members [0, 1, 2]")
    machines[2].kill_training()
    machines[0].wait_for("members [0, 1]\n")
    machines[2].process.wait(60)
    machines.append(Machine(2, folder))
    for machine in (machines[0], machines[1], machines[3]):
        machine.wait_for("done at step 600")
    print(json.dumps([machine.lines for machine in machines]))
    sys.stdout.flush()
    for machine in machines:
        machine.process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
