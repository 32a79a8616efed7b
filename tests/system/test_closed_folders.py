"""Commands of somebody who may not look into the folder, as an operator beside a service with a user of its own."""

import ctypes
import subprocess
import sys

import pytest

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


def as_nobody_special():
    """Root is let in everywhere by these two; who is not root has neither."""
    for right in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, right, 0, 0, 0)


@pytest.mark.parametrize("command", ["status", "fsck", "report"])
def test_a_file_in_a_closed_folder_is_named_with_the_mend(fleet, command):
    config = fleet().config
    closed = config.parent / "state"
    closed.mkdir(exist_ok=True)
    closed.chmod(0)
    words = [sys.executable, "-m", "talaria", "coordinator", command, config]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=120, check=False, preexec_fn=as_nobody_special
        )
    finally:
        closed.chmod(0o700)
    assert done.returncode == 1
    told = f"talaria: {closed / 'coordinator.db'}: Permission denied; give its rights to this user, or run this as"
    assert done.stderr.startswith(told)
    assert "Traceback" not in done.stderr
