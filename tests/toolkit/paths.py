"""Where things lie in the repository, and scripts of this folder in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "specdec" / "pair"


def compiler_s_output(script: str, *arguments: str, **variables: str) -> str:
    """What a script of this folder prints, in which kernels are compiled and not interpreted.  variables: its environment's."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), *sys.path))
    command = [sys.executable, "-P", str(ROOT / "tests" / "toolkit" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
