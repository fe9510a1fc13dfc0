"""Install the pinned torch and torchvision, from the small CPU index where it can be reached.

Needs only the standard library: it runs before anything else is installed. TORCH_INDEX names the
index that is tried first, for these two packages only. Where it does not answer within some
seconds, the default index's build is taken.
"""

import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as the release text gives it
PATIENCE = 15  # seconds to wait for an answer of the index


def answers(index: str, patience: float = PATIENCE) -> bool:
    """Whether `index` lists torch within `patience` seconds (name look-up included)."""
    result: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=patience) as reply:
                result.append(reply.status == 200)
        except (OSError, ValueError):
            result.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return bool(result and result[0])


def pins(constraints: Path) -> list[str]:
    """`torch==…` and `torchvision==…` as constraints.txt pins them."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(("torch==", "torchvision=="))]


def main() -> int:
    """Install, and return pip's exit code."""
    constraints = Path(__file__).parents[1] / "constraints.txt"
    wanted = pins(constraints)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    print(f"installing {' '.join(wanted)} …", flush=True)
    if answers(index):
        first = [*pip, "--no-deps", "--index-url", index, *wanted]
        if subprocess.run(first, check=False).returncode == 0:
            return subprocess.run([*pip, "-c", str(constraints), *wanted], check=False).returncode
    print("the CPU index cannot be reached: taking the default index's build", flush=True)
    first = subprocess.run([*pip, "--no-deps", *wanted], check=False)
    if first.returncode:
        return first.returncode
    return subprocess.run([*pip, "-c", str(constraints), *wanted], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
