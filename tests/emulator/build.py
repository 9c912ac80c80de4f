"""Build the emulated libcuda from the kernels: device code compiled for the host, and a driver that runs it.

Products of one row are one naive kernel here: the real ones are made of instructions that plain C++ has not. Tensor
cores are emulated, for the types in products.cu.
"""

import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = (
    "attention_decode_64",
    "attention_decode_128",
    "attention_decode_256",
    "attention_prefill",
    "elementwise",
    "embed",
    "norm",
    "rope",
    "sample",
    "score",
    "recurrent",
    "experts",
    "latent",
    "expand",
    "rows",
    "gemm",
    "products",
    "smoke",
)

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-tree-vectorize")
"""Vectorised by GCC 12, the scales of Q3_K come out wrong."""

SHARED = re.compile(r"extern __shared__ [^;]*?\b(\w+) (\w+)\[\];")
"""Shared memory of a size that the launch says."""
SHARED_BYTES = r"""struct SharedBytes {
  uint32_t address;
  operator const uint8_t*() const { return emulated_shared + address; }
};
inline uint32_t word_at(const uint8_t* p) { uint32_t word; memcpy(&word, p, 4); return word; }
inline uint4 words4_at(const uint8_t* p) { uint4 words; memcpy(&words, p, 16); return words; }
inline uint32_t low_bits(const uint8_t* p) { return (uint32_t)(uintptr_t)p; }
"""
"""Blocks are read from shared memory as from anywhere."""

MADE_BY_MACRO = re.compile(r"\b(attention_(?:decode|prefill|latent)_|embed_|delta_rule_|delta_tree_)##")
"""The part of a kernel's name that a macro puts in front of what it varies."""


def library(kernels_txt: Path, names: tuple[str, ...] = FILES, groups: bool = True) -> Path:
    """`groups`: as on sm_90a, where four warps multiply together; else as elsewhere."""
    flags = (*FLAGS, *(["-DEMULATED_GROUPS"] if groups else []))
    lines = kernels_txt.read_text().splitlines()[1:]
    sources = ROOT / "kernels"
    places = [*sources.glob("*.cu"), *sources.glob("*.cuh"), *HERE.glob("*.[chc]*")]
    texts = {path.name: path.read_text() for path in places}
    texts = {n: t for n, t in texts.items() if not n.endswith(".cu") or n[:-3] in names}
    digest = hashlib.sha256(repr((sorted(texts.items()), lines, flags)).encode()).hexdigest()[:16]
    out = ROOT / "build" / "tests" / f"emulated-{digest}.so"
    if out.exists():
        return out
    work = out.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    for name in ("cuda_fp16.h", "math_constants.h"):
        (work / name).write_text('#include "cuda_host.h"\n')
    for name, text in texts.items():
        if name.endswith((".h", ".cuh")):
            (work / name).write_text(_for_host(text))
    units = [work / "libcuda.cpp"]
    units[0].write_text(texts["libcuda.cpp"])
    footer = 'extern "C" void emulator_kernel(const char *, const int *, int);'
    names = tuple(n for n in names if f"{n}.cu" in texts)
    for name in names:
        text = texts[f"{name}.cu"]
        registrations = []
        for line in lines:
            kernel, file, *parameters = line.split(" ")
            made_here = name == "products" and f"kernel_{kernel}," in text
            if file.split(".")[0] != name and not made_here:
                continue
            sizes = [_size(p) for p in parameters]
            registrations.append(
                f'static Register register_{kernel}("{kernel}", entry<kernel_{kernel}>);\n'
                f"static int sizes_{kernel}[] = {{{', '.join(map(str, sizes))}}};\n"
                f'static bool sized_{kernel} = (emulator_kernel("{kernel}", sizes_{kernel}, {len(sizes)}), true);'
            )
            text = re.sub(
                rf'(extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?){kernel}\(',
                rf"\1kernel_{kernel}(",
                text,
            )
        text = _for_host(text)
        unit = work / f"{name}.cpp"
        unit.write_text('#include "cuda_host.h"\n' + text + "\n" + footer + "\n" + "\n".join(registrations) + "\n")
        units.append(unit)
    naive = work / "naive.cpp"
    naive.write_text(texts["naive.cpp"])
    units.append(naive)
    objects = []
    running = []
    for unit in units:
        objects.append(unit.with_suffix(".o"))
        running.append(
            subprocess.Popen(
                [
                    "g++",
                    *flags,
                    f"-I{work}",
                    "-c",
                    str(unit),
                    "-o",
                    str(objects[-1]),
                ]
            )
        )
    if any(p.wait() for p in running):
        raise RuntimeError("the emulator does not compile")
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(out) + ".part"], check=True)
    Path(str(out) + ".part").rename(out)
    return out


def _for_host(text: str) -> str:
    text = SHARED.sub(r"\1 *\2 = (\1 *)emulated_shared;", text)
    text = re.sub(r"struct SharedBytes \{.*?\};\n", lambda _: SHARED_BYTES, text, flags=re.S)
    return MADE_BY_MACRO.sub(r"kernel_\1##", text)


def _size(parameter: str) -> int:
    kind = parameter.partition("@")[0]
    if "[" in kind:
        return int(kind[kind.index("[") + 1 : -1])
    return int(kind.lstrip("usfb")) // 8
