"""The weights of a plan as float32 matrices, dequantised once."""

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF, Tensor
from reflex_ipc.plan import Plan
from reflex_ipc.reference.dequant import DEQUANTISERS, dequantise

Array = npt.NDArray[np.float32]


class Weights:
    """`weights[name]` is the tensor in NumPy order (`ne` reversed), float32.

    The file is read with `pread`, not through its mapping: a file that shrinks while it is read is then an error
    with a name, where a mapping would kill the process.
    """

    def __init__(
        self, gguf: GGUF, plan: Plan, n_threads: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._gguf = gguf
        self._tensors = plan.weights
        self._arrays: dict[str, Array] = {}
        for tensor in plan.weights.values():
            if tensor.type.name not in DEQUANTISERS:
                raise UnsupportedModelError(
                    f"{gguf.path}: tensor {tensor.name} is {tensor.type.name}, which the CPU backend cannot read"
                )
        self._load(plan.resident(), n_threads, progress)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def rows(self, name: str, ids: Sequence[int]) -> Array:
        """(len(ids), ne[0]): some rows of a matrix, dequantised on the way where it is not resident."""
        array = self._arrays.get(name)
        if array is not None:
            return array[np.asarray(ids, np.int64)]
        tensor = self._tensors[name]
        out = np.empty((len(ids), tensor.ne[0]), np.float32)
        for row, i in zip(out, ids, strict=True):
            raw = self._read(tensor, i * tensor.row_bytes, tensor.row_bytes)
            dequantise(raw, tensor.type.name, tensor.ne[0], row)
        return out

    def _load(self, tensors: Sequence[Tensor], n_threads: int, progress: Callable[[int, int], None] | None) -> None:
        """Dequantise on `n_threads` threads: NumPy lets go of the interpreter inside its loops."""
        total = sum(t.nbytes for t in tensors)
        queue = iter(tensors)
        lock = threading.Lock()
        done = 0
        failures: list[BaseException] = []

        def work() -> None:
            nonlocal done
            while not failures:
                with lock:
                    tensor = next(queue, None)
                if tensor is None:
                    return
                try:
                    raw = self._read(tensor, 0, tensor.nbytes)
                    self._arrays[tensor.name] = dequantise(raw, tensor.type.name, tensor.n_elements).reshape(
                        tensor.shape
                    )
                except BaseException as error:
                    failures.append(error)
                    return
                with lock:
                    done += tensor.nbytes

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(n_threads, len(tensors)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
                    if progress is not None:
                        progress(done, total)
        except BaseException as error:
            failures.append(error)  # the other threads stop at their next tensor
            raise
        if failures:
            raise failures[0]

    def _read(self, tensor: Tensor, start: int, length: int) -> bytearray:
        shard = self._gguf.shards[tensor.shard]
        buffer = bytearray(length)
        view, filled = memoryview(buffer), 0
        while filled < length:
            try:
                n = os.preadv(shard.fd, [view[filled:]], tensor.offset + start + filled)
            except OSError as error:
                raise ModelFileError(f"{shard.path}: reading tensor {tensor.name} failed: {error.strerror}") from error
            if n == 0:
                raise ModelFileError(f"{shard.path}: the file ended inside tensor {tensor.name}; did it change?")
            filled += n
        return buffer

    def close(self) -> None:
        self._arrays.clear()
