"""`reflex doctor`: what a start on this machine will meet, each point with a remedy.

Nothing here is on the start-up path. Each check is a line: ok, a note (works, but not as well as it could), FAIL, or
skip, for what only an open device could say where there is none. The lines are the same ones on every machine.
"""

import ctypes
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from reflex_ipc.cuda import LIB, native
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.driver import LIBRARY, NO_DEVICE, OPTIONAL, PROTOTYPES, Driver, gib
from reflex_ipc.cuda.launch import Kernels, choose, shipped
from reflex_ipc.cuda.upload import BUFFERS, CHUNK, THREADS
from reflex_ipc.environment import usable_cpus
from reflex_ipc.errors import CheckFailedError, ReflexError
from reflex_ipc.terminal import write

OK, NOTE, FAIL, SKIP = "ok", "note", "FAIL", "skip"
NVML = "libnvidia-ml.so.1"
RING = THREADS * BUFFERS * CHUNK
RAISE_LIMIT = "raise it: ulimit -l, LimitMEMLOCK= of the service, --ulimit memlock=-1 of the container"
ENERGY_NEEDS = "only energy figures need it; containers want the driver's utility capability"


class Check(NamedTuple):
    """One point: what was looked at, how it is, what helps ("" where nothing needs help), and figures for programs."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    figures: dict[str, Any] = {}  # noqa: RUF012  # never changed


def run(as_json: bool, index: int = 0, library: str = LIBRARY, nvml: str = NVML, lib: str = LIB) -> int:
    """Print every check to stdout and return the exit code: 0, or 1 when one failed."""
    checks = examine(index, library, nvml, lib)
    healthy = all(check.state != FAIL for check in checks)
    if as_json:
        listed = [
            {"name": c.name, "state": c.state.lower(), "detail": c.detail, "remedy": c.remedy, **c.figures}
            for c in checks
        ]
        write(json.dumps({"ok": healthy, "checks": listed}, indent=2) + "\n")
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            write(f"{check.state:<4}  {check.name:<{width}}  {check.detail}\n")
            if check.remedy:
                write(f"{'':<{width + 8}}{check.remedy}\n")
    return 0 if healthy else CheckFailedError.exit_code


def examine(index: int = 0, library: str = LIBRARY, nvml: str = NVML, lib: str = LIB) -> list[Check]:
    """Every check; of the device, whatever can be said without one."""
    package = [_kernels(lib), *_package(lib)]

    def without(missing: str, *first: Check) -> list[Check]:
        return [*first, *package, *_without_device(missing, nvml, lib)]

    try:
        cu = Driver(library)
        for name in sorted(PROTOTYPES.keys() - OPTIONAL):
            getattr(cu, name)
    except ReflexError as error:
        return without("driver", _failed("driver", error), _skipped("device", "driver"))
    try:
        device = Device(index, cu)
    except ReflexError as error:
        if cu.cuInit(0) not in (0, NO_DEVICE):  # it says the same every time
            return without("driver", _failed("driver", error), _skipped("device", "driver"))
        return without("device", _tried("driver", lambda: _driver(cu, nvml)), _failed("device", error))
    with device:
        return [
            _tried("driver", lambda: _driver(cu, nvml, device)),
            _tried("device", lambda: _device(device)),
            *package,
            _tried("build", lambda: _build(device, lib)),
            _tried("memory", lambda: _memory(device)),
            _tried("locked memory", lambda: _locked_memory(device)),
            _cores(),
            _tried("energy", lambda: _energy(device, nvml)),
        ]


def _without_device(missing: str, nvml: str, lib: str) -> list[Check]:
    """The checks of an open device where the one named `missing` has failed."""
    build = _skipped("build", missing)
    if fallback := _fallback(shipped(lib)):
        build = build._replace(detail=f"{build.detail}; {fallback}", figures={"target": None, "jit": None})
    counter = _loaded(nvml)
    energy = counter if isinstance(counter, Check) else _skipped("energy", missing)
    return [build, _skipped("memory", missing), _limit(), _cores(), energy]


def _skipped(name: str, missing: str) -> Check:
    what = missing if missing == "kernels" else f"a {missing}"
    return Check(name, SKIP, f"not known without {what}", f"first what `{missing}` needs")


def _tried(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except ReflexError as error:
        return _failed(name, error)


def _failed(name: str, error: ReflexError) -> Check:
    what, _, remedy = str(error).rpartition("; ")  # what is said last is what to do
    return Check(name, FAIL, what or remedy, remedy if what else "`nvidia-smi` and `dmesg` may say more")


def _driver(cu: Driver, nvml: str, device: Device | None = None) -> Check:
    version = cu.version()
    figures: dict[str, Any] = {"cuda": list(version)}
    detail = f"supports CUDA {version[0]}.{version[1]}"
    if release := _release(nvml):
        figures["release"] = release
        detail = f"{release}, {detail}"
    if device is not None:
        start = 1e3 * (device.times["context"] - device.times["begin"])
        figures["start_ms"] = round(start, 1)
        detail += f"; driver and context were up after {start:.0f} ms"
    return Check("driver", OK, detail, figures=figures)


def _device(device: Device) -> Check:
    capability = ".".join(map(str, device.capability))
    figures = {
        "index": device.index,
        "device": device.name,
        "compute_capability": capability,
        "multiprocessors": device.attribute(device.MULTIPROCESSORS),
        "compute_mode": device.compute_mode(),
    }
    return Check("device", OK, f"{device.index}: {device.name}, compute capability {capability}", figures=figures)


def _kernels(lib: str) -> Check:
    targets = shipped(lib)
    if not targets:
        remedy = "install it with REFLEX_CUDA=native where the device is, or REFLEX_CUDA=all for any"
        return Check("kernels", FAIL, "this package was installed without kernels", remedy, {"targets": []})
    return Check("kernels", OK, f"for {', '.join(targets)}", figures={"targets": targets})


def _fallback(targets: list[str]) -> str:
    """What a device does that none of the cubins is for, or "" where there is nothing for one."""
    ptx = [target for target in targets if target.startswith("compute_")]
    return f"for one without kernels the driver compiles PTX ({', '.join(ptx)}), which takes long" if ptx else ""


def _package(lib: str) -> list[Check]:
    """The manifest against the files, and what a device has vouched for."""
    try:
        with open(os.path.join(lib, "manifest.json"), encoding="utf-8") as file:
            manifest = json.load(file)
        return [_files(manifest, lib), _verified(manifest["verification"])]
    except FileNotFoundError:
        if not shipped(lib):
            return [_skipped("package", "kernels"), _skipped("verified", "kernels")]
        detail = "manifest.json is missing"
    except OSError as error:
        detail = f"manifest.json: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):  # cut, or of a version that wrote something else
        detail = "manifest.json is damaged, or the kernels are of another version of this package"
    return [Check("package", FAIL, detail, "install the package again"), _skipped("verified", "package")]


def _files(manifest: dict[str, Any], lib: str) -> Check:
    broken = [name for name, entry in manifest["files"].items() if _size(os.path.join(lib, name)) != entry["bytes"]]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        detail = f"{', '.join(broken[:3])}{more} {'is' if len(broken) == 1 else 'are'} missing or cut"
        return Check("package", FAIL, detail, "install the package again")
    if native.load(lib) is None:
        detail = "early.so does not load: the driver starts later and the upload is slower"
        return Check("package", NOTE, detail, "build the package on this machine: REFLEX_CUDA=native")
    detail = f"{len(manifest['kernels'])} kernels, built with CUDA {manifest['nvcc']}"
    return Check("package", OK, detail, figures={"toolkit": manifest["nvcc"]})


def _verified(verification: dict[str, Any]) -> Check:
    figures, left_out = {"verification": verification}, _left_out(verification["runs"])
    if verification["state"] == "verified":
        detail = f"these sources passed on {verification['device']}, driver {verification['driver']}{left_out}"
        return Check("verified", OK, detail, figures=figures)
    n, why = len(verification["files"]), verification["why"]
    files = "1 source file has" if n == 1 else f"{n} source files have"
    detail = f"{files} not been tested on a device: {why}{left_out}"
    return Check("verified", NOTE, detail, "in a checkout, on a machine with a device: pytest -m gpu", figures)


def _left_out(runs: dict[str, Any]) -> str:
    """Which tests the last whole runs skipped, and why."""
    names: dict[str, list[str]] = {}
    for name, run in sorted(runs.items()):
        whole = run["passed"] + sum(run["skipped"].values())
        for reason, count in sorted(run["skipped"].items()):
            names.setdefault(f"{count} of {whole} tests skipped: {reason.partition(': ')[0]}", []).append(name)
    return "".join(f"; {skipped} (run with {' and '.join(names[skipped])})" for skipped in names)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _build(device: Device, lib: str) -> Check:
    """Which build this device runs, and that the driver takes every kernel of it."""
    target = choose(device.capability, shipped(lib))
    if target is None:
        remedy = "install it with REFLEX_CUDA=native on this machine"
        return Check("build", FAIL, "none of the kernels run on this device", remedy)
    if target.startswith("compute_"):
        detail = f"no kernels for this device: the driver compiles PTX ({target}), which takes long the first time"
        return Check("build", NOTE, detail, "REFLEX_CUDA=native builds kernels for it", {"target": target, "jit": True})
    began = time.monotonic()
    kernels = Kernels(device, lib)
    for name in kernels.names():
        kernels.function(name)
    milliseconds = 1e3 * (time.monotonic() - began)
    detail = f"{kernels.target}: all {len(kernels.names())} kernels load, in {milliseconds:.1f} ms"
    return Check("build", OK, detail, figures={"target": kernels.target, "jit": kernels.is_ptx})


def _memory(device: Device) -> Check:
    free, total = device.memory()
    figures = {"free": free, "total": total}
    detail = f"{gib(free)} free of {gib(total)}"
    if free < total // 2:
        return Check("memory", NOTE, detail, "another process has the rest: nvidia-smi shows which", figures)
    return Check("memory", OK, detail, figures=figures)


def _limit() -> Check:
    """The limit of locked memory, against what an upload page-locks."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", OK, "limit unlimited", figures={"limit": None, "ring": RING})
    figures = {"limit": limit, "ring": RING}
    if limit < RING:
        return Check("locked memory", NOTE, f"limit {gib(limit)}, of {gib(RING)} for an upload", RAISE_LIMIT, figures)
    return Check("locked memory", OK, f"limit {gib(limit)}", figures=figures)


def _locked_memory(device: Device) -> Check:
    """Page-lock as much as an upload does: drivers differ in whether the limit binds them."""
    import mmap

    _, _, said, _, figures = _limit()
    said = said.partition(",")[0]
    ring = mmap.mmap(-1, RING)
    view = (ctypes.c_char * RING).from_buffer(ring)
    address = ctypes.addressof(view)
    began = time.monotonic()
    code = device.cu.cuMemHostRegister_v2(address, RING, 0)
    milliseconds = 1e3 * (time.monotonic() - began)
    if code:
        name, _ = device.cu.describe(code)
        detail = f"{gib(RING)} cannot be page-locked: {name}; {said}"
        return Check("locked memory", FAIL, detail, RAISE_LIMIT, figures)
    device.cu.check(device.cu.cuMemHostUnregister(address), "giving back page-locked memory")
    return Check("locked memory", OK, f"{said}; {gib(RING)} page-locked in {milliseconds:.0f} ms", figures=figures)


def _cores() -> Check:
    cores = usable_cpus()
    figures = {"cores": cores}
    if cores < THREADS:
        detail = f"{cores}: fewer than the {THREADS} reader threads that fill a fast link"
        return Check("cores", NOTE, detail, "give the process more, if the upload matters", figures)
    return Check("cores", OK, f"{cores}", figures=figures)


def _energy(device: Device, nvml: str) -> Check:
    """NVML's counter of joules, which `reflex bench` reads."""
    library = _loaded(nvml)
    if isinstance(library, Check):
        return library
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    code = library.nvmlInit_v2()
    code = code or library.nvmlDeviceGetHandleByPciBusId_v2(device.bus_id().encode(), ctypes.byref(handle))
    code = code or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    if code:
        return Check("energy", NOTE, f"this device has no energy counter (NVML error {code})", ENERGY_NEEDS)
    joules = millijoules.value / 1e3
    return Check("energy", OK, f"counter at {joules:.0f} J", figures={"joules": joules})


def _loaded(nvml: str) -> ctypes.CDLL | Check:
    """NVML, or what is to be said where there is none."""
    try:
        return ctypes.CDLL(nvml)
    except OSError as error:
        return Check("energy", NOTE, f"no NVML: {error}", ENERGY_NEEDS)


def _release(nvml: str) -> str:
    try:
        library = ctypes.CDLL(nvml)
    except OSError:
        return ""
    text = ctypes.create_string_buffer(80)
    failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text))
    return "" if failed else text.value.decode("ascii", "replace")
