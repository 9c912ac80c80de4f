"""The prototypes, structures and numbers of the driver layer against cuda.h, where a toolkit is installed."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

import build
from reflex_ipc.cuda import driver
from reflex_ipc.cuda.device import Device

LETTERS = {
    "d": ("CUdeviceptr", "unsigned long long", "cuuint64_t", "CUmemGenericAllocationHandle"),
    "z": ("size_t",),
    "u": ("unsigned int", "unsigned char"),
    "i": ("int", "CUdevice", "CUresult", "CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureMode",
          "CUmemAllocationGranularity_flags"),
    "p": ("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction", "CUgraph", "CUgraphExec"),
}  # fmt: skip
"""The letters of driver.PROTOTYPES by the header's types."""

STRUCTURES = {
    "CUlaunchConfig": (driver.LaunchConfig, "grid_x gridDimX block_z blockDimZ shared sharedMemBytes stream hStream "
                       "attributes attrs attribute_count numAttrs"),
    "CUlaunchAttribute": (driver.LaunchAttribute, "id id value value"),
    "CUmemAllocationProp": (driver.AllocationProperties, "type type location_type location "
                            "windows win32HandleMetaData"),
    "CUmemAccessDesc": (driver.AccessDescription, "location_type location access flags"),
}  # fmt: skip
"""Ours, and pairs of our field and the header's at the same offset."""

NUMBERS = {
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": Device.MULTIPROCESSORS,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": Device.COMPUTE_MODE,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": Device.CAPABILITY_MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": Device.CAPABILITY_MINOR,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": Device.SHARED_PER_BLOCK,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": Device.VIRTUAL_MEMORY,
    "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED": Device.READ_ONLY_REGISTER,
    "CUDA_ERROR_INVALID_VALUE": driver.INVALID_VALUE,
    "CUDA_ERROR_OUT_OF_MEMORY": driver.OUT_OF_MEMORY,
    "CUDA_ERROR_NO_DEVICE": driver.NO_DEVICE,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": driver.DEVICE_UNAVAILABLE,
    "CUDA_ERROR_NOT_READY": driver.NOT_READY,
    "CUDA_ERROR_NOT_SUPPORTED": driver.NOT_SUPPORTED,
    # Those that stand in the code under a name of their own.
    "CU_STREAM_NON_BLOCKING": 1,
    "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1,
    "CU_EVENT_DISABLE_TIMING": 2,
    "CU_MEMHOSTALLOC_PORTABLE": 1,
    "CU_MEMHOSTALLOC_DEVICEMAP": 2,
    "CU_MEMHOSTREGISTER_READ_ONLY": 8,
    "CU_MEM_ALLOCATION_TYPE_PINNED": 1,
    "CU_MEM_LOCATION_TYPE_DEVICE": 1,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3,
    "CU_JIT_ERROR_LOG_BUFFER": 5,
    "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2,
    "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": 4,
    "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6,
}


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cuda.h of the toolkit, where there is one."""
    try:
        nvcc = build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    source = tmp_path_factory.mktemp("header") / "asks.cu"
    source.write_text("#include <cuda.h>\n")
    listed = subprocess.run([nvcc, "-M", source], capture_output=True, text=True, check=True).stdout
    words = re.split(r"(?<!\\)\s+", listed)  # as make writes them: a space in a path behind a backslash
    return Path(next(word for word in words if word.endswith("/cuda.h")).replace("\\ ", " "))


def test_prototypes(header: Path):
    letters = {name: letter for letter, names in LETTERS.items() for name in names}
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    for name, ours in driver.PROTOTYPES.items():
        # A versioned symbol is declared by its plain name, which a macro renames.
        renamed = re.search(rf"#define (\w+)\s+(?:__CUDA_API_PT[DS]S?Z?\()?{name}\)?\s", text)
        declared = re.search(rf"CUresult CUDAAPI {renamed[1] if renamed else name}\(([^)]*)\)", text)
        assert declared is not None, name
        theirs = ""
        for argument in filter(None, (a.strip() for a in declared[1].split(","))):
            if "*" in argument:
                theirs += "s" if re.match(r"const char \*\w", argument) else "p"
            elif argument != "void":
                theirs += letters[re.sub(r"\bconst\b|\w+$", "", argument).strip()]
        assert ours == theirs, name


def test_structures_and_numbers(header: Path):
    """The compiler compares: each assertion that fails names itself."""
    lines = ["#include <cuda.h>", "#include <stddef.h>"]
    for name, (ours, pairs) in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(ours)}, "{name}");')
        for field, theirs in zip(pairs.split()[::2], pairs.split()[1::2], strict=True):
            offset = getattr(ours, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {theirs}) == {offset}, "{name}.{theirs}");')
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in NUMBERS.items()]
    lines += [f"enum {{ has_{name} = {name} }};" for name in driver.REMEDIES]
    command = ["cc", "-fsyntax-only", "-x", "c", f"-I{header.parent}", "-"]
    result = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
