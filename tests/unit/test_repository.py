"""What is committed is source: nothing that a tool downloaded or built."""

import subprocess

from conftest import ROOT

LARGEST = 600_000  # bytes


def test_no_committed_file_is_large():
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]
    own = [name for name in names if not name.startswith("docs/assets/js/mermaid")]  # self-hosted
    large = [name for name in own if (ROOT / name).lstat().st_size > LARGEST]
    assert names and not large
