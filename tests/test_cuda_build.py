"""Building the kernels: what goes in, what comes out, what stops it. The compiler itself is used where it is installed
(`pip install '.[nvcc]'`, or NVCC=path)."""

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from fakecuda import ROOT, Fake

import build
import objects
from reflex_ipc.cuda import native
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.launch import Kernels, shipped

pytest_plugins = ["fakecuda.fixtures"]


@pytest.fixture(scope="module")
def nvcc() -> Path:
    try:
        return build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def built(nvcc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smoke.cu for every architecture."""
    out = tmp_path_factory.mktemp("built") / "lib"
    with pytest.MonkeyPatch.context() as patch:
        only_smoke(patch, tmp_path_factory.mktemp("sources"))
        summary = build.build(build.targets_of(["all"]), out, cache(tmp_path_factory))
    assert summary.startswith("3 kernels in 1 files, ")
    return out


def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "objects"


def only_smoke(patch: pytest.MonkeyPatch, here: Path, **sources: str) -> None:
    """Build from a folder of its own: smoke.cu or the sources given, and the native part."""
    texts = {f"{name}.cu": text for name, text in sources.items()} or {
        "smoke.cu": (ROOT / "kernels" / "smoke.cu").read_text()
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    (here / "native").mkdir()
    for path in (ROOT / "kernels" / "native").iterdir():
        (here / "native" / path.name).write_bytes(path.read_bytes())
    (here / "spills.json").write_text("{}")
    patch.setattr(build, "HERE", here)


# With the compiler


def test_every_architecture_and_ptx(built: Path):
    assert shipped(str(built)) == ["compute_80", "sm_100", "sm_120", "sm_75", "sm_80", "sm_90a"]
    for target in shipped(str(built)):
        assert (built / target / "kernels.txt").read_text().splitlines() == [
            "13.0.88",
            f"smoke_arguments smoke.{kind(target)} u8@0 u16@2 u32@4 u64@8 f32@16 f64@24 b8[20]@32 u64@56",
            f"smoke_axpy_f32 smoke.{kind(target)} u32@0 f32@4 u64@8 u64@16",
            f"smoke_axpy_i32 smoke.{kind(target)} u32@0 u32@4 u64@8 u64@16",
        ]
    assert (
        zlib.decompress((built / "compute_80" / "smoke.ptx.z").read_bytes())
        .decode()
        .split(".target ")[1]
        .startswith("sm_80")
    )


def kind(target: str) -> str:
    return "ptx.z" if target.startswith("compute") else "cubin"


def test_the_manifest_says_what_is_there(built: Path):
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["nvcc"] == "13.0.88"
    assert manifest["sources"]["smoke.cu"] == build._sha256(ROOT / "kernels" / "smoke.cu")
    assert {*manifest["sources"]} == {
        "smoke.cu", "native/early.c", "native/order.c", "native/order.h", "native/strings.c", "native/upload.c",
        "native/upload.h"
    }  # fmt: skip
    on_disk = {str(p.relative_to(built)) for p in built.rglob("*") if p.is_file()} - {"manifest.json"}
    assert {*manifest["files"]} == on_disk
    assert all((built / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    axpy = manifest["kernels"]["smoke_axpy_f32"]
    assert axpy["source"] == "smoke.cu"
    assert axpy["parameters"][1] == {"type": "f32", "offset": 4, "size": 4}
    assert {*axpy["builds"]} == {*build.ARCHITECTURES, build.PTX}
    for target in build.ARCHITECTURES:
        usage = axpy["builds"][target]
        assert 8 <= usage["registers"] <= 40 and usage["spill"] == usage["stack"] == usage["shared"] == 0
    assert manifest["verification"]["state"] in ("verified", "pending")


def test_the_driver_layer_takes_the_build(fake: Fake, built: Path):
    fake.c.fake_kernels(str(built / "sm_90a" / "kernels.txt").encode())
    with Device(0, fake.cu) as device:
        kernels = Kernels(device, str(built))
        for name in kernels.names():
            kernels.function(name)
        memory, stream = device.allocate(800, "x"), device.stream()
        kernels.function("smoke_axpy_f32").prepare(
            (1, 1, 1), (256, 1, 1), [100, 2, memory.address, memory.address + 400], stream
        )()
    assert native.load(str(built)) is not None


def test_a_second_build_compiles_nothing_and_is_the_same(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    only_smoke(monkeypatch, tmp_path)
    ran = []
    real = build._run
    monkeypatch.setattr(build, "_run", lambda command: ran.append(Path(command[0]).name) or real(command))
    out = tmp_path / "lib"
    out.mkdir()
    (out / "old").touch()
    build.build(build.targets_of(["all"]), out, cache(tmp_path_factory))
    assert ran == ["nvcc", os.environ.get("CC", "cc")]  # nvcc --version, and the native part
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()} == {
        str(p.relative_to(built)): p.read_bytes() for p in built.rglob("*") if p.is_file()
    }
    assert [p.name for p in tmp_path.glob("lib*")] == ["lib"]


SHARED = """#include "types.cuh"
extern "C" __global__ void gather(Row row, float *out) {
    __shared__ float room[64];
    room[threadIdx.x] = row.x[threadIdx.x % 4];
    __syncthreads();
    out[threadIdx.x] = room[63 - threadIdx.x];
}
"""


def test_a_header_rebuilds_only_what_includes_it(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only_smoke(monkeypatch, tmp_path, a=SHARED, b='extern "C" __global__ void nothing() {}\n')
    (tmp_path / "types.cuh").write_text('#include "more.cuh"\nstruct Row { float x[WIDTH]; };\n')
    (tmp_path / "more.cuh").write_text("#define WIDTH 4\n")
    ran = []
    real = build._run
    monkeypatch.setattr(
        build, "_run", lambda command: ran.extend(str(c) for c in command if str(c).endswith(".cu")) or real(command)
    )
    out, kept = tmp_path / "lib", tmp_path / "kept"
    build.build(["sm_80"], out, kept)
    assert sorted(Path(path).name for path in ran) == ["a.cu", "b.cu"]
    lines = (out / "sm_80" / "kernels.txt").read_text().splitlines()
    assert lines[1:] == ["gather a.cubin b8[16]@0 u64@16", "nothing b.cubin"]
    usage = json.loads((out / "manifest.json").read_text())["kernels"]["gather"]["builds"]["sm_80"]
    assert usage["shared"] == 256
    ran.clear()
    (tmp_path / "more.cuh").write_text("#define WIDTH 8\n")
    build.build(["sm_80"], out, kept)
    assert [Path(path).name for path in ran] == ["a.cu"]
    assert "gather a.cubin b8[32]@0 u64@32" in (out / "sm_80" / "kernels.txt").read_text()


GREEDY = """extern "C" __global__ void __launch_bounds__(1024) greedy(float *x) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; i++) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) x[(95 - i) * 1024 + threadIdx.x] = a[i] * a[(i * 7) % 96];
}
"""


def test_spills_stop_the_build_unless_recorded(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only_smoke(monkeypatch, tmp_path, greedy=GREEDY)
    out, kept = tmp_path / "lib", tmp_path / "kept"
    with pytest.raises(build.BuildError, match=r"greedy sm_80: \d+ bytes, 0 allowed"):
        build.build(["sm_80"], out, kept)
    assert not out.exists()
    build.build(["sm_80"], out, kept, record=True)
    allowed = json.loads((tmp_path / "spills.json").read_text())
    assert allowed["greedy sm_80"] > 0
    build.build(["sm_80"], out, kept)
    (tmp_path / "spills.json").write_text(json.dumps({"greedy sm_80": allowed["greedy sm_80"] - 1}))
    with pytest.raises(build.BuildError, match="kernels spill registers"):
        build.build(["sm_80"], out, kept)


KERNEL = 'extern "C" __global__ void {}({}) {{}}'


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"a": "what is this"}, "error"),
        ({"a": "__device__ int f() { int unused = 1; return 2; }"}, "unused"),  # warnings are errors
        ({"a": KERNEL.format("k", "int"), "b": KERNEL.format("k", "int")}, "k is in a.cu and in b.cu"),
        ({"a": f"#if __CUDA_ARCH__ >= 800\n{KERNEL.format('k', 'int')}\n#else\n{KERNEL.format('k', 'float')}\n#endif"},
         "k takes other parameters on sm_75 than on sm_80"),
    ],
)  # fmt: skip
def test_what_does_not_compile_leaves_the_old_build(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources, words
):
    only_smoke(monkeypatch, tmp_path, **sources)
    out = tmp_path / "lib"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(build.BuildError, match=words):
        build.build(["sm_75", "sm_80"], out, tmp_path / "kept")
    assert (out / "old").exists()


def test_damaged_cubins_are_refused(built: Path):
    cubin = (built / "sm_90a" / "smoke.cubin").read_bytes()
    whole = objects.cubin_parameters(cubin)
    assert whole["smoke_arguments"][6] == (32, 20)
    rng = random.Random(0)
    for _ in range(20_000):
        data = bytearray(cubin)
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(objects.FormatError):
            objects.cubin_parameters(bytes(data))


def test_the_command(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    only_smoke(monkeypatch, tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["build.py", "sm_80", "--out", str(tmp_path / "lib"), "--cache", str(tmp_path / "kept")]
    )
    assert build.main() == 0
    assert capsys.readouterr().out.startswith("3 kernels in 1 files")
    monkeypatch.setattr(sys, "argv", ["build.py", "sm80"])
    assert build.main() == 1
    assert "'sm80' is no target" in capsys.readouterr().err


# Without it


def test_ptx_parameters():
    text = """
.visible .entry plain(
	.param .u32 plain_param_0,
	.param .align 128 .b8 plain_param_1[128],
	.param .u64 .ptr .align 1 plain_param_2,
	.param .u64 .ptr .global .align 16 plain_param_3,
	.param .f64 plain_param_4
)
.visible .entry _Z4bareILi3EEvv()
"""
    parsed = objects.ptx_parameters(text)
    assert parsed == {
        "plain": (("u32", 0, 4), ("b8[128]", 128, 128), ("u64", 256, 8), ("u64", 264, 8), ("f64", 272, 8)),
        "_Z4bareILi3EEvv": (),
    }
    with pytest.raises(objects.FormatError, match="k: cannot read the parameter"):
        objects.ptx_parameters(".entry k(.reg .u32 a)")
    with pytest.raises(objects.FormatError, match="ELF"):
        objects.cubin_parameters(b"nothing")
    with pytest.raises(objects.FormatError, match="ptxas printed no line"):
        objects.usage("Compiling entry function 'k' for 'sm_80'")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r"nvcc was not found: pip install nvidia-cuda-nvcc==13.0.88"):
        build.find_nvcc()
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(build.BuildError, match="nvcc does not run"):
        build.build(["sm_80"], tmp_path / "lib", tmp_path / "kept")


def test_native_targets(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("reflex_ipc.cuda.driver.Driver", lambda: fake.cu)
    for major, minor, target in ((9, 0, "sm_90a"), (8, 9, "sm_80"), (12, 1, "sm_120"), (14, 0, "compute_80")):
        fake.set(major=major, minor=minor, devices=2)
        assert build.targets_of(["native"]) == [target]
    fake.set(devices=0)
    with pytest.raises(build.BuildError, match="which kernels would be native"):
        build.targets_of(["native"])


def test_the_backend_asks_for_the_compiler_only_when_it_builds(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("setuptools")
    import backend

    monkeypatch.delenv("NVCC", raising=False)
    here = any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))
    for asked, mode in (
        (None, "native" if here else "off"),
        ("", "native" if here else "off"),
        ("off", "off"),
        ("all", "all"),
    ):
        if asked is None:
            monkeypatch.delenv("REFLEX_CUDA", raising=False)
        else:
            monkeypatch.setenv("REFLEX_CUDA", asked)
        assert backend.mode() == mode
        assert backend._requirements() == ([] if mode == "off" else build.NVCC_PACKAGES)
    monkeypatch.setenv("NVCC", "/usr/local/cuda/bin/nvcc")
    assert backend._requirements() == []
    monkeypatch.setenv("REFLEX_CUDA", "some")
    with pytest.raises(SystemExit, match="it may be off, native or all"):
        backend.mode()


def test_the_native_part_needs_no_toolkit(tmp_path: Path):
    build.build_native(tmp_path / "early.so")
    library = native.load(str(tmp_path))
    assert library is not None and native.early_times(library) == {}
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", tmp_path / "early.so"], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert exported == set(native._SIGNATURES)
    assert native.load(str(tmp_path / "nowhere")) is None
    assert library.reflex_upload_new(0, 2, 4096) is None and library.reflex_upload_new(1, 99, 4096) is None
    assert ctypes.sizeof(ctypes.c_void_p) == 8
