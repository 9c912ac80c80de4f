"""The build backend: setuptools, and before it the kernels.

REFLEX_CUDA says which: "native" for the devices of this machine, "all" for every architecture (wheels for others),
"off" for none. Without it: native where there is an NVIDIA device, off elsewhere. nvcc, 100 MB, is asked for only when
kernels are built, and not when NVCC names one.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import build

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None


def mode() -> str:
    """Which kernels to build: off, native or all."""
    here = any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "dxg"))
    asked = os.environ.get("REFLEX_CUDA") or ("native" if here else "off")
    if asked not in ("off", "native", "all"):
        raise SystemExit(f"REFLEX_CUDA is {asked!r}; it may be off, native or all")
    return asked


def _requirements() -> list[str]:
    return [] if mode() == "off" or os.environ.get("NVCC") else list(build.NVCC_PACKAGES)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_requirements()]


def _build_kernels() -> None:
    if mode() != "off":
        try:
            print(build.build(build.targets_of([mode()])))
        except build.BuildError as error:
            raise SystemExit(f"the kernels cannot be built: {error}\nREFLEX_CUDA=off installs without them") from None


def build_wheel(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _build_kernels()
    shutil.rmtree(build.ROOT / "build" / "lib", ignore_errors=True)  # setuptools ships whatever an earlier build left
    settings = dict(config_settings or {})
    if build.LIB.exists():
        if build.is_stale():
            raise SystemExit(f"{build.LIB} was built from other sources: set REFLEX_CUDA, or remove it")
        # Machine code is inside: the wheel is for this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        settings.setdefault("--build-option", ["--plat-name", platform])
    return str(build_meta.build_wheel(directory, settings, metadata_directory))


def build_editable(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _build_kernels()
    return str(build_meta.build_editable(directory, config_settings, metadata_directory))
