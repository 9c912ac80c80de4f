"""`reflex doctor` against the fake driver: every point passes where it should, fails where it should, with a remedy."""

import json
import re
import shutil
from pathlib import Path

import pytest
from fakecuda import Fake, native_part

from reflex_ipc import doctor

pytest_plugins = ["fakecuda.fixtures"]

KERNELS = "13.0.88\nscale scale.cubin u32@0 u64@8\n"


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    lib = tmp_path / "lib"
    for target in ("sm_90a", "compute_80"):
        (lib / target).mkdir(parents=True)
        (lib / target / "kernels.txt").write_text(KERNELS)
        (lib / target / "scale.cubin").write_bytes(b"\x7fELF....")
    built = native_part()
    shutil.copy(built, lib / "early.so")
    files = {str(p.relative_to(lib)): {"bytes": p.stat().st_size} for p in lib.rglob("*") if p.is_file()}
    runs = {"cubin": {"passed": 7, "skipped": {}}, "ptx": {"passed": 5, "skipped": {"no model": 2}}}
    verification = {"state": "verified", "device": "H200", "driver": "580.1", "runs": runs}
    manifest = {"nvcc": "13.0.88", "kernels": {"scale": {}}, "files": files, "verification": verification}
    (lib / "manifest.json").write_text(json.dumps(manifest))
    return lib


def look(fake: Fake, lib: Path, **options: object) -> dict[str, doctor.Check]:
    fake.c.fake_kernels(str(lib / "sm_90a" / "kernels.txt").encode()) if (
        lib / "sm_90a" / "kernels.txt"
    ).exists() else None
    options = {"library": fake.path, "nvml": fake.path, "lib": str(lib)} | options
    return {check.name: check for check in doctor.examine(**options)}


def test_a_healthy_machine(fake: Fake, lib: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 16)
    checks = look(fake, lib)
    assert {check.state for check in checks.values()} == {"ok"}, checks
    assert [check.remedy for check in checks.values() if check.remedy] == []
    assert checks["driver"].detail.startswith("580.00.fake, supports CUDA 13.0")
    assert checks["device"].detail == "0: Fake 0, compute capability 9.0"
    assert checks["kernels"].figures == {"targets": ["compute_80", "sm_90a"]}
    assert checks["build"].detail.startswith("sm_90a: all 1 kernels load")
    assert checks["package"].detail == "1 kernels, built with CUDA 13.0.88"
    skipped = "2 of 7 tests skipped: no model (run with ptx)"
    assert checks["verified"].detail == f"these sources passed on H200, driver 580.1; {skipped}"
    assert checks["memory"].detail == "1.00 GiB free of 1.00 GiB"
    assert "96.0 MiB page-locked" in checks["locked memory"].detail
    assert checks["energy"].figures == {"joules": 1234.567}
    assert "cuMemHostUnregister" in fake.log

    assert doctor.run(False, library=fake.path, nvml=fake.path, lib=str(lib)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == len(checks) and all(line.startswith("ok    ") for line in lines)
    assert doctor.run(True, library=fake.path, nvml=fake.path, lib=str(lib)) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["ok"] is True
    device = next(check for check in said["checks"] if check["name"] == "device")
    assert (device["state"], device["compute_capability"], device["multiprocessors"]) == ("ok", "9.0", 132)


def test_no_driver_and_no_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "none.so")
    assert doctor.run(False, library=missing, nvml=missing, lib=str(tmp_path)) == 1
    out = capfd.readouterr().out
    assert "FAIL  driver         no NVIDIA driver: " in out and "install one that supports CUDA 13" in out
    assert "FAIL  kernels        this package was installed without kernels\n" in out and "REFLEX_CUDA=native" in out
    assert doctor.run(True, library=missing, nvml=missing, lib=str(tmp_path)) == 1
    said = json.loads(capfd.readouterr().out)
    assert [check["name"] for check in said["checks"]] == LINES
    assert said["ok"] is False and said["checks"][0]["state"] == "fail" and said["checks"][0]["remedy"]


@pytest.mark.parametrize(
    ("settings", "name", "state", "detail", "remedy"),
    [
        ({"devices": 0}, "device", "FAIL", "shows no device", "--backend cpu"),
        ({"major": 7, "minor": 2}, "device", "FAIL", "7.2; the kernels need 7.5 or newer", "--backend cpu"),
        ({"major": 13}, "build", "note", "the driver compiles PTX (compute_80)", "REFLEX_CUDA=native"),
        ({"major": 7, "minor": 5}, "build", "FAIL", "none of the kernels run", "REFLEX_CUDA=native"),
        ({"registrable": 0}, "locked memory", "FAIL", "cannot be page-locked: CUDA_ERROR_NOT_SUPPORTED", "ulimit -l"),
        ({"energy": 0}, "energy", "note", "no energy counter (NVML error 3)", "only energy figures"),
    ],
)
def test_what_is_wrong_is_said(fake: Fake, lib: Path, settings, name, state, detail, remedy):
    fake.set(**settings)
    check = look(fake, lib)[name]
    assert check.state == state and detail in check.detail and remedy in check.remedy


LINES = ["driver", "device", "kernels", "package", "verified", "build", "memory", "locked memory", "cores", "energy"]


@pytest.mark.parametrize("limit", [-1, 64 << 10])
def test_the_same_lines_everywhere(fake: Fake, lib: Path, tmp_path: Path, capfd, monkeypatch, limit: int):
    """With a device, without one, without a driver, and with one that does not start or is too old."""
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (limit, limit))

    def lines(**options: object) -> dict[str, dict]:
        options = {"library": fake.path, "nvml": fake.path, "lib": str(lib)} | options
        code = doctor.run(False, **options)
        text = capfd.readouterr().out
        assert code == doctor.run(True, **options)
        checks = json.loads(capfd.readouterr().out)["checks"]
        assert [check["name"] for check in checks] == LINES
        text = re.sub(r"[\d.]+ ms", "", text)
        assert all(re.sub(r"[\d.]+ ms", "", check["detail"]) in text and check["remedy"] in text for check in checks)
        assert all(check["remedy"] for check in checks if check["state"] in ("fail", "skip"))
        found = {check["name"]: check for check in checks}
        assert found["locked memory"]["limit"] == (None if limit < 0 else limit)
        assert ("limit unlimited" if limit < 0 else "limit 65536 bytes") in found["locked memory"]["detail"]
        if "FAIL" in text:
            assert "ulimit -l" in found["locked memory"]["remedy"] or limit < 0
            assert found["build"]["state"] == found["memory"]["state"] == "skip"
            assert "the driver compiles PTX (compute_80)" in found["build"]["detail"]
        return found

    look(fake, lib)
    assert lines()["device"]["compute_capability"] == "9.0"
    missing = str(tmp_path / "none.so")
    found = lines(library=missing, nvml=missing)
    assert (found["driver"]["state"], found["device"]["state"], found["energy"]["state"]) == ("fail", "skip", "note")
    found = lines(library="libc.so.6")
    assert "too old" in found["driver"]["detail"] and found["device"]["state"] == "skip"
    for settings, words in (
        ({"devices": 0}, "shows no device"),
        ({"devices": 1, "major": 7, "minor": 0}, "compute capability 7.0"),
    ):
        fake.set(**settings)
        found = lines()
        assert (found["driver"]["state"], found["device"]["state"], found["energy"]["state"]) == ("ok", "fail", "skip")
        assert words in found["device"]["detail"] and found["driver"]["cuda"] == [13, 0]


def test_a_driver_that_does_not_start(fake: Fake, lib: Path):
    fake.fail("cuInit", code=803, lost=True)
    checks = look(fake, lib)
    assert checks["driver"].state == "FAIL" and "SYSTEM_DRIVER_MISMATCH" in checks["driver"].detail
    assert checks["device"].state == "skip"


def test_memory_in_use(fake: Fake, lib: Path):
    from reflex_ipc.cuda.device import Device

    with Device(0, fake.cu) as device:
        device.allocate(600 << 20, "something else")
        check = look(fake, lib)["memory"]
        assert check.state == "note" and "424.0 MiB free" in check.detail and "nvidia-smi" in check.remedy


def test_a_damaged_package(fake: Fake, lib: Path):
    (lib / "sm_90a" / "scale.cubin").write_bytes(b"")
    checks = look(fake, lib)
    assert checks["package"].state == "FAIL" and checks["package"].detail == "sm_90a/scale.cubin is missing or cut"
    assert checks["build"].state == "FAIL" and "CUDA_ERROR_INVALID_IMAGE" in checks["build"].detail
    (lib / "early.so").unlink()
    assert "early.so" in look(fake, lib)["package"].detail
    lacking = json.loads((lib / "manifest.json").read_text())
    lacking["files"] |= {f"sm_75/{name}.cubin": {"bytes": 1} for name in "abcde"}
    (lib / "manifest.json").write_text(json.dumps(lacking))
    assert look(fake, lib)["package"].detail.endswith("sm_75/a.cubin and 4 more are missing or cut")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "manifest.json is missing"),
        ("", "manifest.json is damaged"),
        ('{"nvcc": "13', "manifest.json is damaged"),
        ("[]", "manifest.json is damaged"),
        ('{"files": {"a": 1}}', "or the kernels are of another version"),
        ("older", "or the kernels are of another version"),
    ],
)
def test_a_manifest_that_cannot_be_read(fake: Fake, lib: Path, content: str | None, words: str):
    """Damaged packages are what doctor is for."""
    path = lib / "manifest.json"
    if content == "older":  # before what was skipped was kept
        manifest = json.loads(path.read_text())
        del manifest["verification"]["runs"]
        content = json.dumps(manifest)
    path.unlink() if content is None else path.write_text(content)
    checks = look(fake, lib)
    assert list(checks) == LINES
    assert checks["package"].state == "FAIL" and words in checks["package"].detail
    assert checks["package"].remedy == "install the package again" and checks["verified"].state == "skip"


def test_the_device_asked_for(fake: Fake, lib: Path):
    fake.set(devices=2)
    assert look(fake, lib, index=1)["device"].detail.startswith("1: Fake 1, ")
    missing = look(fake, lib, index=2)
    assert missing["driver"].state == "ok" and missing["device"].state == "FAIL"
    assert "--device takes one of 0: Fake 0, 1: Fake 1" in missing["device"].detail


def test_a_native_part_for_another_machine(fake: Fake, lib: Path):
    size = (lib / "early.so").stat().st_size
    (lib / "early.so").write_bytes(b"\0" * size)
    check = look(fake, lib)["package"]
    assert check.state == "note" and "early.so does not load" in check.detail


def test_sources_no_device_has_seen(fake: Fake, lib: Path):
    manifest = json.loads((lib / "manifest.json").read_text())
    manifest["verification"] = {"state": "pending", "why": "no device could be had", "files": ["kernels/a.cu"]}
    manifest["verification"]["runs"] = {key: {"passed": 5, "skipped": {"no model: x": 2}} for key in ("cubin", "ptx")}
    (lib / "manifest.json").write_text(json.dumps(manifest))
    check = look(fake, lib)["verified"]
    why, skipped = "no device could be had", "2 of 7 tests skipped: no model (run with cubin and ptx)"
    assert check.state == "note"
    assert check.detail == f"1 source file has not been tested on a device: {why}; {skipped}"


def test_without_nvml(fake: Fake, lib: Path, tmp_path: Path):
    checks = look(fake, lib, nvml=str(tmp_path / "none.so"))
    assert checks["energy"].state == "note" and "no NVML" in checks["energy"].detail
    assert checks["driver"].detail.startswith("supports CUDA 13.0")


@pytest.mark.parametrize("code", [999, 2])
def test_any_call_that_fails_is_a_failed_check(fake: Fake, lib: Path, code: int):
    look(fake, lib)
    releasing = next(i for i, line in enumerate(fake.log) if line.startswith("cuCtxSynchronize"))
    for n in range(1, releasing):
        fake.reset()
        fake.fail(n=n, code=code)
        checks = look(fake, lib)
        assert [c.name for c in checks.values() if c.state == "FAIL"], fake.log[n - 1]
        assert all(c.remedy for c in checks.values() if c.state == "FAIL")
        assert fake.leaks == fake.violations == []
