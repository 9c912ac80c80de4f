"""Files taken to pieces and put together again, changed: what writers do differently, done to a fixture."""

from math import prod
from pathlib import Path
from typing import Any

import gguf_bytes as g
import numpy as np
import numpy.typing as npt
from legacy_file import put_together

from reflex_ipc.gguf import TYPES

Array = npt.NDArray[Any]
_DTYPES = {"F32": np.float32, "F16": np.float16}


class Parts:
    """`metadata` and `tensors` (number of the type, ne, content) of a file, to be changed and written."""

    def __init__(self, source: Path) -> None:
        raw = source.read_bytes()
        self.metadata, tensors = g.read_plainly(raw)
        self.arch = self.metadata["general.architecture"].decode()
        self.tensors: dict[str, tuple[int, list[int], bytes]] = {}
        for name, (number, ne, at) in tensors.items():
            size = prod(ne) // TYPES[number].block * TYPES[number].size
            self.tensors[name] = number, ne, raw[at : at + size]

    def __getitem__(self, name: str) -> Array:
        """A tensor of floats in NumPy's order."""
        number, ne, content = self.tensors[name]
        return np.frombuffer(content, _DTYPES[TYPES[number].name]).reshape(ne[::-1])

    def __setitem__(self, name: str, array: Array) -> None:
        number = next(number for number, kind in TYPES.items() if _DTYPES.get(kind.name) == array.dtype)
        self.tensors[name] = number, list(array.shape[::-1]), array.tobytes()

    def pop(self, name: str) -> Array:
        array = self[name]
        del self.tensors[name]
        return array

    def key(self, name: str) -> Any:
        return self.metadata[f"{self.arch}.{name}"]

    def set(self, **keys: Any) -> None:
        """Keys of the architecture's section, with __ for a dot; None takes one away."""
        for name, value in keys.items():
            full = f"{self.arch}.{name.replace('__', '.')}"
            self.metadata.pop(full, None)
            if value is not None:
                self.metadata[full] = value

    def layers(self, tensor: str) -> list[str]:
        """`blk.N.` of all layers that have such a tensor."""
        return [name.removesuffix(tensor) for name in self.tensors if name.endswith("." + tensor)]

    def write(self, out: Path) -> Path:
        return put_together(self.metadata, self.tensors, out)
