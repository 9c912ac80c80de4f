"""The upload against a fake driver: every byte arrives, events cover their groups, and whatever fails ends in a typed
error with nothing left behind."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from fakecuda import Fake, native_part
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_ipc.cuda import upload as upload_module
from reflex_ipc.cuda.copiers import Copier, MappedCopier
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.upload import BUFFERS, CHUNK, PADDING, THREADS, Upload, cut, page_cache
from reflex_ipc.errors import DeviceError, ModelFileError, OutOfMemoryError

pytest_plugins = ["fakecuda.fixtures"]

SIZE = 21 * (1 << 20) + 12345


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the native part."""
    directory = tmp_path_factory.mktemp("lib")
    built = native_part()
    shutil.copy(built, directory / "early.so")
    return directory


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def model(tmp_path: Path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(params=["native", "mapped"])
def way(request: pytest.FixtureRequest, lib: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What makes `Upload` choose each way."""
    monkeypatch.setattr(MappedCopier, "chunk", 4 << 20)
    return {"cores": 8 if request.param == "native" else 1, "lib": str(lib)}


def groups_of(fd: int, size: int = SIZE, seed: int = 0) -> list[tuple[int, list[tuple[int, int, int, int]]]]:
    """Tensors of all sizes from 32 bytes on behind a header, in nine groups of which one is empty; the first tensor of
    the file is used last, as an output matrix is."""
    rng = random.Random(seed)
    at, pieces = 1024, []
    while at < size:
        length = min(rng.choice([32, 4096, 100_000, 3 << 20]) + rng.randrange(100), size - at) if pieces else 4096
        pieces.append((fd, at, length, at - 1024))
        at = -(-(at + length) // 32) * 32
    pieces.append(pieces.pop(0))
    share = -(-len(pieces) // 8)
    groups = [pieces[i : i + share] for i in range(0, len(pieces), share)]
    groups.insert(3, [])
    return list(enumerate(groups))


# Cutting


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 4000), st.booleans())), max_size=8)
)
@settings(max_examples=150, deadline=None)
def test_chunks_cover_every_piece_in_order(plan):
    size = 1024
    ends = [100, 5000]
    groups, pieces = [], []
    for index, group in enumerate(plan):
        made = []
        for fd, gap, length, jumps in group:
            gap = (0, 31, PADDING, PADDING + 1)[gap]
            offset = ends[fd] + gap
            made.append((fd, offset, length, offset + fd * 10_000_000 + (7777 * index if jumps else 0)))
            ends[fd] = offset + length
        groups.append((index, made))
        pieces += [(index, *piece) for piece in made if piece[2]]
    chunks = cut(groups, size)
    place_of = {}
    last = -1
    for fd, first_group, last_group, offset, length, place in chunks:
        assert 0 < length <= size and offset // size == (offset + length - 1) // size
        assert last <= first_group <= last_group, "groups complete in order"
        last = first_group
        for at in (offset, offset + length - 1):
            assert (fd, at, place - offset) not in place_of or at == offset
        place_of[fd, offset, place - offset] = (offset + length, first_group, last_group)
    for index, fd, offset, length, place in pieces:
        at = offset
        while at < offset + length:
            start = next(
                s
                for (f, s, shift), (e, _, _) in place_of.items()
                if f == fd and shift == place - offset and s <= at < e
            )
            end, first_group, last_group = place_of[fd, start, place - offset]
            assert first_group <= index <= last_group
            at = end
    # Nothing but the pieces and the padding between them is copied.
    copied, wanted = sum(c[4] for c in chunks), sum(p[3] for p in pieces)
    assert wanted <= copied <= wanted + PADDING * len(pieces)


def test_chunks_cross_the_borders_of_tensors_and_groups():
    groups = [
        (0, [(5, 64, 1000, 0), (5, 1088, 900, 1024)]),
        (1, []),
        (2, [(5, 1988, 100, 1924)]),
        (3, [(5, 4096, 10, 9000)]),
    ]
    assert cut(groups, 1024) == [
        (5, 0, 0, 64, 960, 0), (5, 0, 2, 1024, 1024, 960), (5, 2, 2, 2048, 40, 1984), (5, 3, 3, 4096, 10, 9000)
    ]  # fmt: skip


# Copying


def run(device: Device, upload: Upload, groups, memory) -> None:
    upload.order(groups)
    upload.start(device, memory.address)


@pytest.mark.parametrize("deferred", [0, 1])
def test_every_byte_arrives(fake: Fake, way, model: int, data: bytes, deferred: int):
    fake.set(deferred=deferred)
    with Device(0, fake.cu) as device:
        memory, stream = device.allocate(SIZE - 1024, "weights"), device.stream()
        upload = Upload(SIZE, **way)
        groups = groups_of(model)
        run(device, upload, groups, memory)
        for index, pieces in groups:
            upload.wait_group(stream, index)
            for _, offset, size, place in pieces:
                # Read on the stream that was made to wait: in deferred mode nothing else drives the copies.
                assert stream.read(memory.address + place, size) == data[offset : offset + size]
        upload.join()
        assert stream.read(memory.address, SIZE - 1024) == data[1024:]
        assert upload.queued == upload.timings["bytes"] == SIZE - 1024
        assert upload.timings["started"] <= upload.timings["done"]
        upload.close()
        upload.close()
        assert [line for line in fake.leaks if not line.startswith(("device memory", "stream", "context"))] == []


def test_several_files(fake: Fake, way, tmp_path: Path, data: bytes):
    fds = []
    for i in range(3):
        (tmp_path / f"{i}").write_bytes(data[i * 1_000_000 : (i + 1) * 1_000_000])
        fds.append(os.open(tmp_path / f"{i}", os.O_RDONLY))
    with Device(0, fake.cu) as device:
        memory = device.allocate(3_000_000, "weights")
        upload = Upload(3_000_000, **way)
        run(device, upload, [(i, [(fd, 0, 1_000_000, i * 1_000_000)]) for i, fd in enumerate(fds)], memory)
        upload.join()
        assert device.stream().read(memory.address, 3_000_000) == data[:3_000_000]
    for fd in fds:
        os.close(fd)


def test_nothing_to_copy(fake: Fake, way):
    with Device(0, fake.cu) as device:
        memory, stream = device.allocate(1, "weights"), device.stream()
        upload = Upload(0, **way)
        run(device, upload, [(0, []), (1, [])], memory)
        upload.wait_group(stream, 1)
        upload.join()


# Choosing


def description(fake: Fake, groups, **options: object) -> dict[str, object]:
    with Device(0, fake.cu) as device:
        memory = device.allocate(SIZE, "weights")
        upload = Upload(SIZE, **options)
        run(device, upload, groups, memory)
        upload.join()
        assert device.stream().read(memory.address, SIZE - 1024) == os.pread(groups[0][1][0][0], SIZE, 1024)
        return upload.timings


def test_what_there_is_decides_how(fake: Fake, lib: Path, tmp_path: Path, model: int):
    groups = groups_of(model)
    many = description(fake, groups, cores=16, lib=str(lib))
    assert (many["way"], many["threads"], many["buffers"], many["chunk"]) == (
        "native",
        3,
        BUFFERS,
        CHUNK,
    )  # a small file
    assert (many["cache"], many["cores"]) == ("warm", 16)
    assert description(fake, groups, cores=2, lib=str(lib))["way"] == "mapped"
    assert description(fake, groups, cores=16, lib=str(tmp_path))["way"] == "mapped"
    few = Upload(100 * CHUNK, cores=4, lib=str(lib))
    many = Upload(100 * CHUNK, cores=64, lib=str(lib))
    assert (few._copier.description()["threads"], many._copier.description()["threads"]) == (4, THREADS)
    few.close()
    many.close()


def test_what_cannot_be_page_locked_is_read(fake: Fake, lib: Path, model: int):
    for settings_ in ({"read_only_register": 0}, {"read_only_register": 1, "registrable": 0}):
        fake.set(**settings_)
        assert description(fake, groups_of(model), cores=1, lib=str(lib))["way"] == "mapped"
        assert not any(line.startswith("cuMemHostUnregister") for line in fake.log)


def test_a_cold_file_is_read_ahead(fake: Fake, lib: Path, model: int, data: bytes, tmp_path: Path):
    def cool() -> bool:
        os.fsync(model)
        os.posix_fadvise(model, 0, 0, os.POSIX_FADV_DONTNEED)
        return page_cache(groups_of(model)) == "cold"

    if not cool():
        pytest.skip("this file system keeps its files in memory, or does not say")
    with Device(0, fake.cu) as device:
        for cores, where, way, threads in ((1, lib, "native", 3), (8, lib, "native", 3), (1, tmp_path, "mapped", 1)):
            memory = device.allocate(SIZE, "weights")
            assert cool()
            upload = Upload(SIZE, cores=cores, lib=str(where))
            upload.order(groups_of(model))
            deadline = time.monotonic() + 20
            while page_cache(groups_of(model)) != "warm":  # before start: nothing but reading ahead does that
                assert time.monotonic() < deadline
                time.sleep(0.01)
            upload.start(device, memory.address)
            upload.join()
            assert device.stream().read(memory.address, SIZE - 1024) == data[1024:]
            assert (upload.timings["cache"], upload.timings["way"], upload.timings["threads"]) == ("cold", way, threads)
            upload.close()


# Faults


def test_a_file_that_ends_early(fake: Fake, way, model: int, tmp_path: Path):
    groups = groups_of(model)
    os.truncate(tmp_path / "model.gguf", SIZE // 2)
    with Device(0, fake.cu) as device:
        memory, stream = device.allocate(SIZE, "weights"), device.stream()
        upload = Upload(SIZE, **way)
        run(device, upload, groups, memory)
        with pytest.raises(ModelFileError, match=rf"model.gguf: the file became shorter .* it has {SIZE // 2} bytes"):
            for index, _ in groups:
                upload.wait_group(stream, index)
        with pytest.raises(ModelFileError, match="became shorter"):
            upload.join()


def test_a_file_that_shrinks_after_it_was_page_locked(fake: Fake, lib: Path, model: int, tmp_path: Path):
    real = MappedCopier._check_sizes

    def shrink(copier: MappedCopier) -> None:
        os.truncate(tmp_path / "model.gguf", 4096)
        real(copier)

    with Device(0, fake.cu) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedCopier, "_check_sizes", shrink)
        memory = device.allocate(SIZE, "weights")
        upload = Upload(SIZE, cores=1, lib=str(lib))
        run(device, upload, groups_of(model), memory)
        with pytest.raises(ModelFileError, match="became shorter"):
            upload.join()


def test_a_file_that_cannot_be_read(fake: Fake, way, tmp_path: Path):
    directory = os.open(tmp_path, os.O_RDONLY)
    with Device(0, fake.cu) as device:
        memory = device.allocate(100, "weights")
        upload = Upload(100, **way)
        run(device, upload, [(0, [(directory, 0, 100, 0)])], memory)
        with pytest.raises(ModelFileError, match=r"reading bytes 0 to 100 failed: Is a directory"):
            upload.join()
    os.close(directory)


def test_a_copy_outside_the_memory(fake: Fake, way, model: int):
    with Device(0, fake.cu) as device:
        memory = device.allocate(SIZE - 1025, "weights")  # one byte too few
        upload = Upload(SIZE, **way)
        run(device, upload, groups_of(model), memory)
        with pytest.raises(DeviceError, match="to the device failed: CUDA_ERROR_INVALID_VALUE"):
            upload.join()
    assert len(fake.violations) == 1
    fake.c.fake_violations_forget()


def once(fake: Fake, way, groups) -> None:
    with Device(0, fake.cu) as device:
        memory, stream = device.allocate(SIZE, "weights"), device.stream()
        upload = Upload(SIZE, **way)
        try:
            run(device, upload, groups, memory)
            for index, _ in groups:
                upload.wait_group(stream, index)
            upload.join()
        finally:
            upload.close()


@pytest.mark.parametrize("code", [999, 2, 700])
def test_every_call_failing_in_turn(fake: Fake, way, model: int, code: int):
    groups = groups_of(model)
    once(fake, way, groups)
    total = fake.calls
    assert fake.leaks == fake.violations == []
    silent = []
    for n in range(1, total + 1, 1 if code == 999 else 7):
        fake.reset()
        fake.fail(n=n, code=code, lost=code == 700)
        try:
            once(fake, way, groups)
        except (DeviceError, OutOfMemoryError) as error:
            assert isinstance(error, OutOfMemoryError) == (code == 2), error
            assert "CUDA_ERROR" in str(error)
        else:
            # How many calls there are depends on which thread is how fast: the last may not come at all.
            silent += [] if fake.fails_left() else [fake.log[n - 1].split()[0]]
        assert fake.leaks == [], n
        assert fake.violations == []
    # Giving back at the end is tried and not complained about; a page that cannot be locked is read instead.
    tolerated = {"cuMemHostUnregister", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuStreamSynchronize"}
    assert set(silent) <= (tolerated if way["cores"] != 1 else {"cuMemHostUnregister", "cuMemHostRegister_v2"})


@pytest.mark.parametrize("phase", ["new", "ordered", "started", "first group"])
def test_closing_at_any_time(fake: Fake, way, model: int, phase: str):
    with Device(0, fake.cu) as device:
        memory, stream = device.allocate(SIZE, "weights"), device.stream()
        upload = Upload(SIZE, **way)
        if phase != "new":
            upload.order(groups_of(model))
        if phase in ("started", "first group"):
            upload.start(device, memory.address)
        if phase == "first group":
            upload.wait_group(stream, 0)
        upload.close()


def test_a_device_that_closes_takes_the_upload_along(fake: Fake, way, model: int):
    for _ in range(20):
        with Device(0, fake.cu) as device:
            memory = device.allocate(SIZE, "weights")
            run(device, Upload(SIZE, **way), groups_of(model), memory)
        assert fake.leaks == fake.violations == []


def test_repeated_uploads_are_right_under_racing_threads(fake: Fake, lib: Path, model: int, data: bytes):
    fake.set(deferred=1)
    with Device(0, fake.cu) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload_module, "CHUNK", 64 << 10)  # 336 chunks
        memory, stream = device.allocate(SIZE, "weights"), device.stream()
        for seed in range(10):
            stream.fill(memory.address, 0, SIZE)
            stream.synchronize()
            groups = groups_of(model, seed=seed)
            upload = Upload(SIZE, cores=12, lib=str(lib))
            run(device, upload, groups, memory)
            for index, pieces in groups:
                upload.wait_group(stream, index)
                for _, offset, size, place in pieces:
                    assert stream.read(memory.address + place, size) == data[offset : offset + size]
            upload.join()
            upload.close()


def test_the_base_says_what_every_way_does():
    base = Copier()
    for call in (
        lambda: base.order([], 0, False), lambda: base.event(0, 0), lambda: base.finished(0), lambda: base.queued,
        base.description, base.free,
    ):  # fmt: skip
        with pytest.raises(NotImplementedError):
            call()
