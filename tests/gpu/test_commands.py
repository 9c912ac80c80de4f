"""The commands that look at a device, on one."""

import json
import subprocess
import sys
from pathlib import Path

from reflex_ipc import smoke
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.launch import Kernels

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = [sys.executable, "-I", "-S", str(ROOT / "reflex_ipc" / "__main__.py")]
"""As the launcher starts the command."""


def test_smoke(kernels: Kernels) -> None:
    done = subprocess.run([*LAUNCHED, "smoke"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[9:52].strip() for line in lines if line.startswith("ok ")] == [name for name, _ in smoke.families()]
    assert kernels.target in lines[2] and "first correct result" in lines[-1]


def test_doctor(device: Device, kernels: Kernels) -> None:
    done = subprocess.run([*LAUNCHED, "doctor", "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["device"]["device"] == device.name
    assert checks["build"]["target"] == kernels.target and checks["build"]["jit"] == kernels.is_ptx
    assert not [check for check in checks.values() if check["state"] in ("fail", "skip")]
