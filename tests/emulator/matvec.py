"""The real matrix-vector kernels on the host: their sources with the few instructions replaced that C++ has not.

The ring copies at once here, lane by lane, as it does on devices without a copy engine; what is asynchronous remains
for a device to show.
"""

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path

from emulator.build import HERE, ROOT, SHARED_BYTES
from reflex_ipc.cuda.products import Call

DOT = r"""    for (int i = 0; i < 4; ++i)
      sum += (Format::is_signed ? (int)(int8_t)(q >> 8 * i) : (int)(uint8_t)(q >> 8 * i)) * (int8_t)(x >> 8 * i);
    return sum;
"""
COPY = "  if (there) memcpy(emulated_shared + to, from, 16); else memset(emulated_shared + to, 0, 16);\n"
REPLACED = {
    "words.cuh": [(r"struct SharedBytes \{.*?\};\n", SHARED_BYTES)],
    "product.cuh": [(r"    int out;\n    if constexpr \(Format::is_signed\).*?    return out;\n", DOT)],
    "copy.cuh": [
        (r"\(uint32_t\)__cvta_generic_to_shared\(p\)", "(uint32_t)((const uint8_t*)p - emulated_shared)"),
        (r"  const uint4 v = there.*?asm volatile.*?;\n", COPY),
    ],
    "matvec.cuh": [(r"extern __shared__ __align__\(16\) uint8_t shared\[\];", "uint8_t* shared = emulated_shared;")],
}
"""File -> (pattern, host code), each found exactly once."""

PRELUDE = """#include "cuda_host.h"
#define __align__(n)
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
#include "matvec.cuh"
extern "C" void emulator_kernel(const char *, const int *, int);
#define ENTRY(NAME, FIRST, SECOND) \\
  REFLEX_MATVEC(NAME, FIRST, SECOND) \\
  static int size_##NAME[] = {sizeof(reflex::MatvecArgs)}; \\
  static bool known_##NAME = (emulator_kernel(#NAME, size_##NAME, 1), true); \\
  static Register register_##NAME(#NAME, entry<NAME>);
"""


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class Matvec:
    """Runs calls of `matvec_*` kernels. `pairs` are the formats of each, as in kernels/linear_*.cu."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._cu = ctypes.CDLL(str(_library(pairs)))

    def __call__(self, calls: list[Call]) -> None:
        for call in calls:
            function = ctypes.c_void_p()
            code = self._cu.cuModuleGetFunction(ctypes.byref(function), None, call.kernel.encode())
            assert code == 0, call.kernel
            triple = ctypes.c_uint * 3
            config = _Config(triple(*call.grid), triple(*call.block), call.shared, None, None, 0)
            (data,) = call.arguments
            buffer = ctypes.create_string_buffer(data, len(data))
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
            self._cu.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)


def _library(pairs: list[tuple[str, str]]) -> Path:
    texts = {path.name: path.read_text() for path in (ROOT / "kernels").glob("*.cuh")}
    for name, replacements in REPLACED.items():
        for pattern, new in replacements:
            texts[name], n = re.subn(pattern, lambda _, new=new: new, texts[name], flags=re.S)
            assert n == 1, f"{name} has {n} of {pattern}"
    texts["cuda_host.h"] = (HERE / "cuda_host.h").read_text()
    texts["libcuda.cpp"] = (HERE / "libcuda.cpp").read_text()
    entries = (f"ENTRY(matvec_{'_'.join(dict.fromkeys((a, b))).lower()}, {a}, {b})\n" for a, b in pairs)
    texts["kernels.cpp"] = PRELUDE + "".join(entries)
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    out = ROOT / "build" / "tests" / f"matvec-{digest}.so"
    if out.exists():
        return out
    work = out.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (work / name).write_text(text)
    (work / "cuda_fp16.h").write_text("")
    units = [str(work / name) for name in ("libcuda.cpp", "kernels.cpp")]
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-w", "-fno-strict-aliasing", f"-I{work}", "-shared", *units]
    subprocess.run([*command, "-o", f"{out}.part"], check=True)
    Path(f"{out}.part").rename(out)
    return out
