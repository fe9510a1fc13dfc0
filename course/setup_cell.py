# @title Setup: run this cell first
# Looks at the installed torch without importing it, and installs the course's release where it
# is older, so that no restart is needed. Then come the helpers that this lesson uses.
import importlib
import importlib.metadata
import shutil
import subprocess
import sys


class RestartNeeded(Exception):
    """Stops the notebook with one line instead of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def ensure_torch(version: str, cpu_index: str) -> None:
    """Install torch `version` unless 2.14 or newer is there; a CUDA build where a GPU is."""

    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "0.0"

    if tuple(map(int, installed("torch").split(".")[:2])) >= (2, 14):
        return
    if "torch" in sys.modules:
        raise RestartNeeded(
            f"torch {installed('torch')} is already imported: restart the runtime, then run again"
        )
    print(f"installing torch {version}, this takes a minute or two …")
    wanted = [f"torch=={version}"]
    if installed("torchvision") != "0.0":
        wanted.append("torchvision==$TORCHVISION")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    cpu = ["--index-url", cpu_index, "--retries", "1", "--timeout", "10"]
    sources = [[]] if shutil.which("nvidia-smi") else [cpu, []]
    for source in sources:
        done = subprocess.run([*pip, *source, *wanted], capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        raise RuntimeError(f"pip could not install torch {version}:\n{done.stderr[-2000:]}")
    importlib.invalidate_caches()
    print(f"torch {installed('torch')} is ready")


ensure_torch("$TORCH", "$CPU_INDEX")
