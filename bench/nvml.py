"""NVML through ctypes: what the device is, and its energy counter."""

import ctypes
from types import TracebackType
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class NVMLError(Exception):
    """NVML is not there, or a call failed; the message names it."""


class Device:
    """One device as NVML sees it. A context manager. Being open does not initialise the compute driver."""

    def __init__(self, index: int = 0, library: str = LIBRARY) -> None:
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError as error:
            raise NVMLError(f"no NVML: {error}") from None
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def __enter__(self) -> "Device":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml.nvmlShutdown()

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._nvml, name)
        except AttributeError:
            raise NVMLError(f"this NVML has no {name}") from None
        code = function(*arguments)
        if code:
            raise NVMLError(f"{name} failed: error {code}")

    def joules(self) -> float:
        """Energy since the driver was loaded. The counter moves in steps (some 100 ms on data-centre parts)."""
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value / 1e3

    def describe(self) -> dict[str, Any]:
        """Name, driver, persistence mode, the link's generation and width; None for what this NVML cannot say."""
        return {
            "name": self._text("nvmlDeviceGetName", self._handle),
            "driver": self._text("nvmlSystemGetDriverVersion"),
            "cuda": self._version(),
            "persistence": self._number("nvmlDeviceGetPersistenceMode"),
            "pcie_generation": self._number("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": self._number("nvmlDeviceGetMaxPcieLinkWidth"),
        }

    def _text(self, name: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        try:
            self._call(name, *arguments, buffer, ctypes.c_uint(len(buffer)))
        except NVMLError:
            return None
        return buffer.value.decode(errors="replace")

    def _number(self, name: str) -> int | None:
        value = ctypes.c_uint()
        try:
            self._call(name, self._handle, ctypes.byref(value))
        except NVMLError:
            return None
        return value.value

    def _version(self) -> str | None:
        value = ctypes.c_int()
        try:
            self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(value))
        except NVMLError:
            return None
        return f"{value.value // 1000}.{value.value % 1000 // 10}"
