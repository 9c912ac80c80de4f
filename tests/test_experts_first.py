"""What a first step's tokens are routed to comes before all other experts: the upload against a fake driver, a step's
waits for it, and the same numbers from the emulated device however the weights came."""

import os
import random
import shutil
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import library
from fakecuda import Fake, native_part

from reflex_ipc import archs
from reflex_ipc.cuda import executor as cuda
from reflex_ipc.cuda import experts, launch, linear, routed
from reflex_ipc.cuda.device import Device, Stream, start_driver
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.cuda.upload import Upload
from reflex_ipc.cuda.weights import Weights
from reflex_ipc.errors import CancelledError, DeviceError, ModelFileError, OutOfMemoryError, ReflexError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import ExpertLinear
from reflex_ipc.plan import Step
from reflex_ipc.sampler import Sampler, Sampling

pytest_plugins = ["fakecuda.fixtures"]

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

N_EXPERT = 8
SLABS = ((4096, 4096, 70_001), (100, 900_000, 5), (5 << 20, 33, 4 << 20))
"""Bytes of a slab of each of three tensors of three layers: small and odd ones, and some that no buffer holds."""
EAGER = 50_000
SIZE = 1000 + sum(EAGER + N_EXPERT * sum(sizes) for sizes in SLABS)


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the native part."""
    directory = tmp_path_factory.mktemp("lib")
    shutil.copy(native_part(), directory / "early.so")
    return directory


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(4).randbytes(SIZE)


@pytest.fixture
def model(tmp_path: Path, data: bytes) -> Iterator[int]:
    (tmp_path / "model.gguf").write_bytes(data)
    fd = os.open(tmp_path / "model.gguf", os.O_RDONLY)
    yield fd
    os.close(fd)


def order_of(fd: int):
    """Three layers as they lie in a file, and as an upload is told: (groups, experts)."""
    groups, experts, at = [], [], 1000
    for layer, sizes in enumerate(SLABS):
        groups.append((layer, [(fd, at, EAGER, at)]))
        at += EAGER
        for size in sizes:
            experts.append((len(SLABS) + layer, (fd, at, N_EXPERT * size, at), N_EXPERT))
            at += N_EXPERT * size
    return [*groups, *((len(SLABS) + layer, []) for layer in range(len(SLABS)))], experts


def routes(*tokens: "tuple[float, ...]") -> bytes:
    """Rows as a router leaves them: numbers of experts, then as many weights."""
    return b"".join(struct.pack(f"<{2 * len(ids)}f", *ids, *[0.5] * len(ids)) for ids in tokens)


def slab(layer: int, tensor: int, expert: int) -> tuple[int, int]:
    """Where a slab lies, from start to stop."""
    start = 1000 + sum(EAGER + N_EXPERT * sum(sizes) for sizes in SLABS[:layer]) + EAGER
    start += N_EXPERT * sum(SLABS[layer][:tensor]) + expert * SLABS[layer][tensor]
    return start, start + SLABS[layer][tensor]


def copied(fake: Fake) -> int:
    return sum(int(line.split()[-1]) for line in fake.log if line.startswith("cuMemcpyHtoDAsync_v2 "))


def begin(device: Device, lib: Path, model: int, *, held: bool, cores: int = 8) -> tuple[Upload, int]:
    memory = device.allocate(SIZE, "weights")
    upload = Upload(SIZE, cores=cores, lib=str(lib))
    upload.order(*order_of(model))
    if held:  # before a thread could take anything
        upload._copier.hold(True)
    upload.start(device, memory.address)
    return upload, memory.address


# Copying


@pytest.mark.parametrize("deferred", [0, 1])
@pytest.mark.parametrize("cores", [8, 1], ids=["native", "mapped"])
def test_every_byte_arrives_unasked(fake: Fake, lib: Path, model: int, data: bytes, deferred: int, cores: int) -> None:
    fake.set(deferred=deferred)
    with Device(0, fake.cu) as device:
        upload, base = begin(device, lib, model, held=False, cores=cores)
        assert upload.knows_experts == (cores == 8)
        stream = device.stream()
        groups, experts = order_of(model)
        for index, pieces in groups:
            upload.wait_group(stream, index)
            for _, at, size, _ in [*pieces, *(piece for group, piece, _ in experts if group == index)]:
                assert stream.read(base + at, size) == data[at : at + size]
        upload.join()
        assert copied(fake) == upload.queued == upload.timings["bytes"] == SIZE - 1000


@pytest.mark.parametrize("deferred", [0, 1])
def test_what_is_asked_for_comes_and_nothing_else(
    fake: Fake, lib: Path, model: int, data: bytes, deferred: int
) -> None:
    fake.set(deferred=deferred)
    with Device(0, fake.cu) as device:
        upload, base = begin(device, lib, model, held=True)
        stream = device.stream()
        expected = len(SLABS) * EAGER
        for layer, tokens in enumerate([[(3, 0)], [(7, 2), (2, 6), (3, 2)], [(1, 1), (0, 7)]]):
            upload.wait_group(stream, layer)
            upload.ask(len(SLABS) + layer, routes(*tokens), len(tokens), 2)
            upload.wait_group(stream, upload.asked)
            for expert in {i for ids in tokens for i in ids}:
                for tensor, size in enumerate(SLABS[layer]):
                    start, stop = slab(layer, tensor, expert)
                    assert stream.read(base + start, size) == data[start:stop], (layer, tensor, expert)
                    expected += size
        deadline = time.monotonic() + 20
        while upload.queued < expected:  # later layers' other tensors, which nobody waited for
            assert time.monotonic() < deadline
        time.sleep(0.05)
        assert copied(fake) == upload.queued == expected < SIZE - 1000
        upload.release()
        upload.join()
        assert stream.read(base + 1000, SIZE - 1000) == data[1000:]
        assert copied(fake) == upload.queued == SIZE - 1000, "nothing comes twice"


def test_what_is_there_is_not_asked_for_again(fake: Fake, lib: Path, model: int) -> None:
    with Device(0, fake.cu) as device:
        upload, _ = begin(device, lib, model, held=True)
        stream = device.stream()
        for _ in range(3):
            upload.ask(3, routes((5, 5)), 1, 2)
            upload.wait_group(stream, upload.asked)
        upload.release()
        upload.join()
        upload.ask(4, routes((0, 1)), 1, 2)
        upload.wait_group(stream, upload.asked)
        assert copied(fake) == SIZE - 1000


def test_numbers_of_no_expert_are_passed_over(fake: Fake, lib: Path, model: int) -> None:
    with Device(0, fake.cu) as device:
        upload, _ = begin(device, lib, model, held=True)
        upload.wait_group(device.stream(), 2)
        upload.ask(3, routes((float("nan"), -1.0), (8.0, float("inf"))), 2, 2)
        upload.wait_group(device.stream(), upload.asked)
        assert upload.queued == 3 * EAGER


def test_asking_while_everything_comes(fake: Fake, lib: Path, model: int, data: bytes) -> None:
    """Nothing is held back: readers take what is asked for out of the middle of what they are about."""
    fake.set(deferred=1)
    with Device(0, fake.cu) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("reflex_ipc.cuda.upload.CHUNK", 64 << 10)
        stream = device.stream()
        for seed in range(6):
            rng = random.Random(seed)
            before = copied(fake)
            upload, base = begin(device, lib, model, held=rng.random() < 0.5, cores=12)
            for layer in range(3):
                ids = [tuple(rng.randrange(N_EXPERT) for _ in range(3)) for _ in range(2)]
                upload.ask(3 + layer, routes(*ids), 2, 3)
                if rng.random() < 0.3:
                    upload.release()
                upload.wait_group(stream, upload.asked)
                for tensor, size in enumerate(SLABS[layer]):
                    for expert in ids[0] + ids[1]:
                        start, stop = slab(layer, tensor, expert)
                        assert stream.read(base + start, size) == data[start:stop]
            upload.release()
            upload.join()
            assert stream.read(base + 1000, SIZE - 1000) == data[1000:]
            assert copied(fake) - before == SIZE - 1000
            upload.close()


# Faults


def test_a_file_that_shrinks_while_experts_are_held_back(fake: Fake, lib: Path, model: int, tmp_path: Path) -> None:
    with Device(0, fake.cu) as device:
        upload, _ = begin(device, lib, model, held=True)
        upload.wait_group(device.stream(), 2)
        os.truncate(tmp_path / "model.gguf", 100_000)
        with pytest.raises(ModelFileError, match=r"became shorter .* it has 100000 bytes"):
            upload.ask(5, routes((1, 2)), 1, 2)
            upload.wait_group(device.stream(), upload.asked)
        with pytest.raises(ModelFileError, match="became shorter"):
            upload.join()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_closing_at_any_time(fake: Fake, lib: Path, model: int, asked: bool, released: bool) -> None:
    for pause in (0, 0.005):
        with Device(0, fake.cu) as device:
            upload, _ = begin(device, lib, model, held=True)
            time.sleep(pause)
            if asked:
                upload.ask(5, routes((1, 2)), 1, 2)
            if released:
                upload.release()
            if pause:
                upload.close()


def once(fake: Fake, lib: Path, model: int) -> None:
    with Device(0, fake.cu) as device:
        upload, _ = begin(device, lib, model, held=True)
        stream = device.stream()
        for layer in range(3):
            upload.wait_group(stream, layer)
            upload.ask(3 + layer, routes((layer, 7)), 1, 2)
            upload.wait_group(stream, upload.asked)
        upload.release()
        for index in range(6):
            upload.wait_group(stream, index)
        upload.join()


def test_every_call_failing_in_turn(fake: Fake, lib: Path, model: int) -> None:
    once(fake, lib, model)
    total = fake.calls
    silent = set()
    for n in range(1, total + 1, 3):
        fake.reset()
        fake.fail(n=n, code=999)
        try:
            once(fake, lib, model)
        except (DeviceError, OutOfMemoryError) as error:
            assert "CUDA_ERROR" in str(error)
        else:
            silent |= set() if fake.fails_left() else {fake.log[n - 1].split()[0]}
        assert (fake.leaks, fake.violations) == ([], []), n
    assert silent <= {"cuMemHostUnregister", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuStreamSynchronize"}


# A step


@pytest.fixture
def moe(fixtures: Path) -> Iterator[GGUF]:
    with GGUF.open(fixtures / "exact" / "qwen3moe-f16.gguf") as gguf:
        yield gguf


def test_experts_come_behind_all_else(moe: GGUF) -> None:
    plan = archs.build(moe)
    whole, apart = Weights(moe, plan), Weights(moe, plan, apart=True)
    experts = {op.weight for op in plan.ops if isinstance(op, ExpertLinear)}
    assert (apart.place, apart.start, apart.stop) == (whole.place, whole.start, whole.stop)
    assert sum(apart.sizes) == sum(whole.sizes) == sum(t.nbytes for t in plan.weights.values())
    assert max(g for n, g in apart.group.items() if n not in experts) < min(apart.group[n] for n in experts)
    of_layer = {op.weight: n for n, op in enumerate(op for op in plan.ops if isinstance(op, ExpertLinear))}
    assert [apart.group[n] for n in of_layer] == sorted(apart.group[n] for n in of_layer), "in execution order"
    assert {piece[1]: n for _, piece, n in apart.experts} == {
        plan.weights[name].offset: plan.weights[name].ne[2] for name in experts
    }


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring, and nothing but what a step asks for from the start on: a model this small would be there at once."""
    monkeypatch.setattr("reflex_ipc.cuda.upload.usable_cpus", lambda: 4)
    start = Upload.start

    def start_held(upload: Upload, device: Device, base: int) -> None:
        upload._copier.hold(True)
        start(upload, device, base)

    monkeypatch.setattr(Upload, "start", start_held)


@needs_kernels
class TestSteps:
    @pytest.fixture
    def reads(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The fake computes nothing: a router's choices come from here, experts 1, 2 and 6. Sizes of what was read."""
        fake.c.fake_kernels(str(KERNELS).encode())
        sizes: list[int] = []
        real = Stream.read

        def read(stream: Stream, address: int, size: int) -> bytes:
            sizes.append(size)
            real(stream, address, size)
            return routes((6.0, 1.0, 2.0))

        monkeypatch.setattr(Stream, "read", read)
        return sizes

    def open(self, fake: Fake, moe: GGUF, **options: object) -> CudaExecutor:
        plan = archs.build(moe)
        return CudaExecutor(moe, plan, 64, opening=start_driver(0, fake.path), **options)

    def test_a_round_trip_a_layer_in_the_first_step_alone(
        self, fake: Fake, held: None, reads: list[int], moe: GGUF
    ) -> None:
        executor = self.open(fake, moe)
        plan, upload = executor.plan, executor._upload
        layers = list(dict.fromkeys(op.routes.name for op in plan.ops if isinstance(op, ExpertLinear)))
        slabs = [plan.weights[op.weight] for op in plan.ops if isinstance(op, ExpertLinear)]
        executor.reserve(16)
        executor.forward(Step.text([1], 0, [0]))
        assert reads == [4 * 6] * len(layers)
        whole, some = sum(t.nbytes for t in slabs), sum(t.nbytes // t.ne[2] * 3 for t in slabs)
        assert upload.timings["first_bytes"] == upload.timings["bytes"] - whole + some
        executor.forward(Step.text([3], 1, [0]))
        upload.join()
        assert len(reads) == len(layers)
        assert upload.queued == upload.timings["bytes"]
        executor.close()

    @pytest.mark.parametrize("why", ["many tokens", "switched off", "progress", "all is there"])
    def test_where_it_does_not_pay(
        self, fake: Fake, reads: list[int], moe: GGUF, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        monkeypatch.setattr("reflex_ipc.cuda.upload.usable_cpus", lambda: 4)
        options: dict[str, object] = {}
        if why == "switched off":
            options["experts_first"] = False
        if why == "progress":
            options["progress"] = lambda what, done, total: None
        executor = self.open(fake, moe, **options)
        if why == "all is there":
            executor._upload.join()
        n = 20 if why == "many tokens" else 1
        executor.reserve(64)
        executor.forward(Step.text(range(n), 0, [n - 1]))
        executor.forward(Step.text([3], n, [0]))
        executor._upload.join()
        assert reads == [] and "first_bytes" not in executor._upload.timings
        executor.close()

    def test_a_step_that_is_cancelled_lets_the_rest_come(
        self, fake: Fake, held: None, reads: list[int], moe: GGUF
    ) -> None:
        executor = self.open(fake, moe)
        executor.reserve(16)

        def poll() -> str | None:
            return "cancelled" if reads else None

        with pytest.raises(CancelledError):
            executor.forward(Step.text([1], 0, [0]), poll)
        assert reads
        executor._upload.join()
        executor.forward(Step.text([1], 0, [0]))
        executor.close()

    def test_every_driver_call_failing_is_a_typed_error(
        self, fake: Fake, held: None, reads: list[int], moe: GGUF
    ) -> None:
        def use() -> None:
            executor = None
            try:
                executor = self.open(fake, moe)
                executor.reserve(16)
                executor.forward(Step.text([1], 0, [0]))
                executor.forward(Step.text([1], 1, [0]))
            finally:
                if executor is not None:
                    executor.close()

        use()
        calls, failed = fake.calls, 0
        for n in range(1, calls, 5):
            fake.reset()
            fake.fail(n=n, code=700)
            try:
                use()
            except (DeviceError, OutOfMemoryError):
                failed += 1
            except ReflexError as error:
                pytest.fail(f"{n}: {error!r}")
            assert (fake.violations, fake.leaks) == ([], []), n
        assert failed > 20


# The same numbers

FIRST = Step.text([5, 9, 17], 0, [2])


@pytest.fixture(scope="module")
def emulated_kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def emulated(emulated_kernels: str, held: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The emulated driver, whose devices compute. Few experts are soon all of them; and where none came first, a step
    would wait for ever for what is held back, and not fail."""
    monkeypatch.setattr(linear, "linear", emulator.naive_linear)
    monkeypatch.setattr(experts, "expert_linear", emulator.naive_experts)
    monkeypatch.setattr(cuda, "Kernels", partial(launch.Kernels, lib=emulated_kernels))
    monkeypatch.setattr(routed, "MOST", 1.0)
    return str(library(KERNELS))


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "qwen3next", "deepseek3"])
def test_answers_are_those_of_a_whole_upload(emulated: str, fixtures: Path, name: str) -> None:
    """Memory nobody has written is no number there: a step that used an expert before it came would show."""
    found = {}
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        plan = archs.build(gguf)
        for first in (True, False):
            executor = CudaExecutor(gguf, plan, 64, opening=start_driver(0, emulated), experts_first=first)
            if not first:
                executor._upload.release()
            executor.reserve(40)
            executor.forward(FIRST)
            if first:
                assert executor._upload.timings["first_bytes"] < executor._upload.timings["bytes"]
            logits = executor.logits()
            assert np.isfinite(logits).all()
            answer = executor.decode(Sampler(Sampling(), plan.n_vocab, [5, 9, 17]))
            found[first] = logits.tobytes(), [next(answer).id for _ in range(17)]
            answer.close()
            executor.close()
    assert found[True] == found[False]


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe"])
def test_a_decision_brings_the_experts_of_its_prompt_alone(emulated: str, fixtures: Path, name: str) -> None:
    found = []
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        plan = archs.build(gguf)
        for is_scored in (False, True):
            executor = CudaExecutor(gguf, plan, 64, opening=start_driver(0, emulated))
            executor.reserve(8)
            if is_scored:
                executor.score(FIRST, [[1, 2, 3]])
            else:
                executor.forward(FIRST)
            timings = executor._upload.timings
            assert timings["first_bytes"] < timings["bytes"]
            found.append((timings["first_bytes"], executor.logits().tobytes()))
            executor.close()
    assert found[0] == found[1]
