"""Compile the kernels ahead of time: for every architecture a cubin from each .cu file, PTX for devices yet unknown.

    python kernels/build.py all          every architecture
    python kernels/build.py native       the devices of this machine
    python kernels/build.py sm_90a ...   these targets ("compute_80" is PTX)

nvcc is found in $NVCC, in the PyPI packages of `NVCC_PACKAGES`, or on the PATH. The result replaces
reflex_ipc/cuda/lib/: a directory a target with the cubins and `kernels.txt` (what a start reads), `manifest.json`
(what tools read) and `early.so`, the native part. Objects are kept by the hash of everything that went into them, so a
second build compiles what changed. The build fails when a kernel spills registers beyond `spills.json`.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import objects
import seal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIB = ROOT / "reflex_ipc" / "cuda" / "lib"
CACHE = ROOT / "build" / "kernels"

ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_100", "sm_120")  # 8.6 and 8.9 run sm_80
PTX = "compute_80"  # the oldest that has everything the general code paths use; newer devices compile it
LARGEST = 8 << 20  # bytes of one target, all files together

with open(ROOT / "pyproject.toml", "rb") as _file:
    NVCC_PACKAGES: list[str] = tomllib.load(_file)["project"]["optional-dependencies"]["nvcc"]
"""The compiler on PyPI."""

NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Werror", "all-warnings")
PTXAS_FLAGS = ("-O3", "-v")
CC_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")


class BuildError(Exception):
    """The kernels cannot be built; the message says why and what helps."""


class Object(NamedTuple):
    """One source file compiled for one target."""

    source: Path
    target: str
    key: str
    parameters: dict[str, tuple[objects.Parameter, ...]]
    usage: dict[str, objects.Usage]  # empty for PTX

    @property
    def file(self) -> str:
        """The name of the result in the target's directory."""
        return self.source.stem + (".ptx.z" if self.is_ptx else ".cubin")

    @property
    def is_ptx(self) -> bool:
        return self.target.startswith("compute_")


class Compiler:
    """nvcc and ptxas of one toolkit."""

    def __init__(self) -> None:
        self.nvcc = find_nvcc()
        self.ptxas = self.nvcc.with_name("ptxas")
        text = _run([self.nvcc, "--version"]).stdout
        match = re.search(r"release [\d.]+, V([\d.]+)", text)
        if match is None:
            raise BuildError(f"{self.nvcc} --version names no release: {text!r}")
        self.version = match[1]

    def key(self, source: Path, target: str) -> str:
        """The hash of everything that decides what an object is."""
        digest = hashlib.sha256(repr((self.version, NVCC_FLAGS, PTXAS_FLAGS, target, source.name)).encode())
        for path in with_headers(source):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:32]

    def compile(self, source: Path, target: str, cache: Path) -> Object:
        """Compile, or take from the cache, which then holds KEY.ptx, KEY.cubin and KEY.log."""
        key = self.key(source, target)
        ptx, cubin, log = (cache / f"{key}.{suffix}" for suffix in ("ptx", "cubin", "log"))
        is_ptx = target.startswith("compute_")
        if not log.exists():  # it is written last
            part = cache / f"{key}.{os.getpid()}.part"
            virtual = target.replace("sm_", "compute_")
            _run([self.nvcc, "-ptx", f"-arch={virtual}", *NVCC_FLAGS, f"-I{HERE}", source, "-o", part])
            os.replace(part, ptx)
            words = ""
            if not is_ptx:
                words = _run([self.ptxas, f"-arch={target}", *PTXAS_FLAGS, ptx, "-o", part]).stderr
                os.replace(part, cubin)
            part.write_text(words)
            os.replace(part, log)
        parameters = objects.ptx_parameters(ptx.read_text())
        usage = {} if is_ptx else objects.usage(log.read_text())
        if not is_ptx:
            _compare(source, target, parameters, objects.cubin_parameters(cubin.read_bytes()))
        return Object(source, target, key, parameters, usage)


def find_nvcc() -> Path:
    """nvcc from $NVCC, from PyPI, or from the PATH."""
    if given := os.environ.get("NVCC"):
        return Path(given)
    namespace = importlib.util.find_spec("nvidia")
    for place in (namespace.submodule_search_locations or []) if namespace else []:
        if (path := Path(place) / "cu13" / "bin" / "nvcc").exists():
            return path
    if found := shutil.which("nvcc"):
        return Path(found)
    raise BuildError("nvcc was not found: pip install " + " ".join(NVCC_PACKAGES) + ", or set NVCC to its path")


def with_headers(source: Path) -> list[Path]:
    """A source file and every header of this directory it includes, directly or not."""
    found, todo = [], [source]
    while todo:
        path = todo.pop()
        if path not in found:
            found.append(path)
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
            todo += [header for name in names if (header := path.parent / name).exists()]
    return sorted(found)


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    try:
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error.strerror}") from None
    if result.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result


def _compare(
    source: Path,
    target: str,
    ptx: dict[str, tuple[objects.Parameter, ...]],
    cubin: dict[str, tuple[tuple[int, int], ...]],
) -> None:
    """PTX and cubin must agree on sizes; offsets may differ, since a cubin aligns to addresses."""
    said = {name: [p.size for p in parameters] for name, parameters in ptx.items()}
    got = {name: [size for _, size in parameters] for name, parameters in cubin.items()}
    if said != got:
        raise BuildError(f"{source.name} for {target}: PTX says {said}, the cubin {got}")


def native_targets() -> list[str]:
    """What the devices of this machine run best."""
    sys.path.insert(0, str(ROOT))
    from reflex_ipc.cuda.device import capabilities
    from reflex_ipc.cuda.driver import Driver
    from reflex_ipc.cuda.launch import choose
    from reflex_ipc.errors import ReflexError

    try:
        driver = Driver()
        driver.start()
        here = capabilities(driver)
    except ReflexError as error:
        raise BuildError(f"which kernels would be native? {error}") from None
    return sorted({choose(capability, [*ARCHITECTURES, PTX]) or PTX for capability in here})


def build(targets: Iterable[str], out: Path = LIB, cache: Path = CACHE, jobs: int = 0, record: bool = False) -> str:
    """Compile everything and replace `out`. Returns a summary; raises `BuildError`."""
    began = time.monotonic()
    compiler = Compiler()
    targets = list(targets)
    sources = sorted(HERE.glob("*.cu"))
    cache.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        tasks = [pool.submit(compiler.compile, s, t, cache) for t in targets for s in sources]
        try:
            built = [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    check_names(built)
    check_spills(built, record)
    staged = out.with_name(out.name + ".new")
    shutil.rmtree(staged, ignore_errors=True)
    sizes = {target: write_target(staged / target, compiler, built, target, cache) for target in targets}
    build_native(staged / "early.so")
    (staged / "manifest.json").write_text(json.dumps(manifest(compiler, built, staged), indent=1) + "\n")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    staged.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    kernels = len({name for made in built for name in made.parameters})
    listed = ", ".join(f"{target} {size / 1024:.0f} KiB" for target, size in sizes.items())
    return f"{kernels} kernels in {len(sources)} files, {time.monotonic() - began:.1f} s: {listed}"


def check_names(built: Sequence[Object]) -> None:
    """One kernel lives in one file and takes the same parameters on every target."""
    seen: dict[str, Object] = {}
    for made in built:
        for name, parameters in made.parameters.items():
            first = seen.setdefault(name, made)
            if first.source != made.source:
                raise BuildError(f"{name} is in {first.source.name} and in {made.source.name}")
            if first.parameters[name] != parameters:
                raise BuildError(f"{name} takes other parameters on {first.target} than on {made.target}")


def check_spills(built: Sequence[Object], record: bool) -> None:
    """Fail when a kernel spills more bytes than the list allows; with `record`, write the list instead."""
    path = HERE / "spills.json"
    now = {
        f"{name} {made.target}": usage.spill
        for made in built
        for name, usage in sorted(made.usage.items())
        if usage.spill
    }
    if record:
        path.write_text(json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    allowed = json.loads(path.read_text())
    worse = [
        f"{key}: {spill} bytes, {allowed.get(key, 0)} allowed"
        for key, spill in now.items()
        if spill > allowed.get(key, 0)
    ]
    if worse:
        raise BuildError(f"kernels spill registers ({path.name} lists what may):\n  " + "\n  ".join(worse))


def write_target(directory: Path, compiler: Compiler, built: Sequence[Object], target: str, cache: Path) -> int:
    """One target's directory; returns its size in bytes."""
    directory.mkdir(parents=True)
    lines = [compiler.version]
    for made in (made for made in built if made.target == target):
        if made.is_ptx:  # text, a tenth of its size when compressed
            (directory / made.file).write_bytes(zlib.compress((cache / f"{made.key}.ptx").read_bytes(), 9))
        else:
            shutil.copyfile(cache / f"{made.key}.cubin", directory / made.file)
        for name, parameters in sorted(made.parameters.items()):
            lines.append(" ".join([name, made.file, *(f"{p.type}@{p.offset}" for p in parameters)]))
    (directory / "kernels.txt").write_text("\n".join(lines) + "\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    if size > LARGEST:
        raise BuildError(f"the kernels for {target} take {size} bytes, more than the {LARGEST} allowed")
    return size


def manifest(compiler: Compiler, built: Sequence[Object], root: Path) -> dict[str, Any]:
    """Everything tools want to know about a build."""
    kernels: dict[str, Any] = {}
    for made in sorted(built, key=lambda made: made.source):
        for name, parameters in sorted(made.parameters.items()):
            entry = kernels.setdefault(
                name,
                {"source": made.source.name, "parameters": [p._asdict() for p in parameters], "builds": {}},
            )
            entry["builds"][made.target] = made.usage[name]._asdict() if made.usage else {}
    return {
        "nvcc": compiler.version,
        "flags": {"nvcc": NVCC_FLAGS, "ptxas": PTXAS_FLAGS},
        "verification": seal.Seal().status(),
        "sources": source_hashes(),
        "files": {
            str(path.relative_to(root)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(root.rglob("*"))
            if path.is_file()
        },
        "kernels": kernels,
    }


def source_hashes() -> dict[str, str]:
    """The hash of every file that a build is made of."""
    paths = [p for pattern in ("*.cu", "*.cuh", "native/*.[ch]") for p in HERE.glob(pattern)]
    return {str(path.relative_to(HERE)): _sha256(path) for path in sorted(paths)}


def is_stale(lib: Path = LIB) -> bool:
    """Whether what lies in `lib` was built from other sources than are here now."""
    made = json.loads((lib / "manifest.json").read_text())
    return bool(made["sources"] != source_hashes())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_native(out: Path) -> None:
    """The native part, with the host's C compiler ($CC)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted((HERE / "native").glob("*.c"))
    _run([os.environ.get("CC", "cc"), *CC_FLAGS, *sources, "-o", out, "-lpthread", "-ldl"])


def targets_of(names: Sequence[str]) -> list[str]:
    """The targets that "all", "native" or a list of names stands for."""
    if list(names) == ["all"]:
        return [*ARCHITECTURES, PTX]
    if list(names) == ["native"]:
        return native_targets()
    for name in names:
        if not re.fullmatch(r"(sm|compute)_\d{2,3}a?", name):
            raise BuildError(f"{name!r} is no target: all, native, or names like sm_90a and compute_80")
    return list(names)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Compile the kernels ahead of time.")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="all, native, or names like sm_90a and compute_80")
    parser.add_argument("--out", type=Path, default=LIB, help="directory to replace (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where objects are kept (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at a time (default: one a core)")
    parser.add_argument(
        "--record-spills", action="store_true", help="allow what spills now; commit spills.json with why"
    )
    options = parser.parse_args()
    try:
        print(build(targets_of(options.targets), options.out, options.cache, options.jobs, options.record_spills))
    except (BuildError, objects.FormatError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
