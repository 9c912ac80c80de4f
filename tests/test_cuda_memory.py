"""What a device gives out: memory, streams, events, against a fake driver that keeps count."""

import struct
import time

import pytest
from fakecuda import Fake

from reflex_ipc.cuda.device import Device, capabilities
from reflex_ipc.errors import DeviceError, OutOfMemoryError

pytest_plugins = ["fakecuda.fixtures"]


def test_properties(device: Device, fake: Fake):
    assert device.name == "Fake 0"
    assert device.bus_id() == "0000:00:00.0"
    assert device.attribute(Device.MULTIPROCESSORS) == 132
    assert device.memory() == (1 << 30, 1 << 30)
    assert device.cu.version() == (13, 0)
    fake.set(devices=3)
    assert capabilities(device.cu) == [(9, 0)] * 3


def test_memory_that_does_not_fit_is_refused_with_the_sum(device: Device):
    device.allocate(1 << 20, "a table")
    with pytest.raises(
        OutOfMemoryError, match=r"allocating 2.00 GiB for the weights failed.*has 1023.0 MiB free of 1.00 GiB"
    ):
        device.allocate(2 << 30, "the weights")


def test_memory_is_freed_once(device: Device, fake: Fake):
    memory = device.allocate(100, "a table")
    memory.close()
    memory.close()
    assert fake.log.count("cuMemFree_v2") == 1
    device.allocate(0, "nothing")


def test_arena(device: Device):
    arena = device.arena(1024, "scratch")
    first = arena.take(1, "one")
    assert arena.take(256, "two") == first + 256
    assert arena.take(4, "three", alignment=4) == first + 512
    mark = arena.used
    assert arena.take(508, "four", alignment=4) == first + 516
    with pytest.raises(OutOfMemoryError, match="five needs 1 bytes, but the 1024 bytes for scratch have 0 bytes left"):
        arena.take(1, "five")
    arena.reset(mark)
    assert arena.take(508, "again", alignment=4) == first + 516


def test_growing_buffer_backs_what_is_asked_for_and_keeps_it(device: Device, fake: Fake):
    mib = 1 << 20
    buffer = device.growing(100 * mib + 1, "the cache")
    stream = device.stream()
    assert buffer.on_demand and buffer.size == 102 * mib and buffer.backed == 0
    assert device.memory()[0] == 1 << 30
    buffer.ensure(3 * mib, 3 * mib)
    assert buffer.backed == 0
    buffer.ensure(3 * mib, 5 * mib)
    assert buffer.backed == 4 * mib
    stream.to_device(buffer.address + 3 * mib, bytes(range(256)))
    buffer.ensure(0, 7 * mib)  # around what is there
    buffer.ensure(2 * mib, 8 * mib)
    assert buffer.backed == 8 * mib
    assert stream.read(buffer.address + 3 * mib, 256) == bytes(range(256))
    stream.fill(buffer.address, 0, 8 * mib)  # across the mappings
    assert [line for line in fake.log if line.startswith("cuMemCreate")] == [
        f"cuMemCreate {size * mib}" for size in (4, 2, 2)
    ]
    with pytest.raises(OutOfMemoryError, match="lie outside"):
        buffer.ensure(0, buffer.size + 1)
    with pytest.raises(DeviceError, match="filling"):
        stream.fill(buffer.address, 0, 8 * mib + 1)
    assert fake.violations == [f"a fill of {8 * mib + 1} bytes leaves the device's memory"]
    fake.c.fake_violations_forget()
    buffer.close()


def test_growing_buffer_out_of_memory_keeps_what_it_has(device: Device):
    buffer = device.growing(2 << 30, "the cache")
    buffer.ensure(0, 1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"allocating 1.50 GiB more for the cache.*free of"):
        buffer.ensure(0, 3 << 29)
    assert buffer.backed == 2 << 20
    buffer.ensure(0, 100 << 20)
    assert buffer.backed == 100 << 20


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_growing_buffer_after_a_call_that_failed(device: Device, fake: Fake, call: str):
    buffer = device.growing(64 << 20, "the cache")
    buffer.ensure(0, 1)
    backed = buffer.backed
    fake.fail(call)
    with pytest.raises(DeviceError, match="for the cache failed"):
        buffer.ensure(0, 32 << 20)
    assert buffer.backed == backed
    buffer.ensure(0, 32 << 20)
    assert buffer.backed >= 32 << 20


def test_growing_buffer_without_virtual_memory_is_allocated_whole(fake: Fake):
    fake.set(virtual_memory=0)
    with Device(0, fake.cu) as device:
        buffer = device.growing(10 << 20, "the cache")
        assert not buffer.on_demand and buffer.backed == 10 << 20
        buffer.ensure(0, 10 << 20)
        device.stream().fill(buffer.address, 1, 10 << 20)
        with pytest.raises(OutOfMemoryError):
            buffer.ensure(0, (10 << 20) + 1)
        with pytest.raises(OutOfMemoryError, match="for the cache"):
            device.growing(2 << 30, "the cache")


def test_pinned_memory_is_seen_from_both_sides(device: Device):
    mailbox = device.pinned(4096, "the mailbox")
    assert bytes(mailbox.view) == bytes(4096)
    stream = device.stream()
    table = device.allocate(8, "a table")
    stream.to_device(table.address, struct.pack("<2i", 7, -9))
    stream.to_host(mailbox.address + 8, table.address, 8)
    stream.synchronize()
    assert mailbox.view.cast("i")[2:4].tolist() == [7, -9]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data)).cast("i")])
def test_copies_take_any_bytes(device: Device, kind):
    data = bytes(range(64))
    stream, table = device.stream(), device.allocate(128, "a table")
    stream.to_device(table.address, kind(data))
    stream.within(table.address + 64, table.address, 64)
    assert stream.read(table.address, 128) == data * 2


def test_copies_outside_are_refused(device: Device, fake: Fake):
    stream, table = device.stream(), device.allocate(16, "a table")
    with pytest.raises(DeviceError, match="copying 17 bytes to the device failed: CUDA_ERROR_INVALID_VALUE"):
        stream.to_device(table.address, bytes(17))
    with pytest.raises(DeviceError, match="copying 16 bytes from the device"):
        stream.read(table.address + 1, 16)
    assert len(fake.violations) == 2
    fake.c.fake_violations_forget()


def test_a_stream_waits_for_an_event_of_another(device: Device, fake: Fake):
    fake.set(deferred=1)
    table, one, two, event = device.allocate(4, "a table"), device.stream(), device.stream(), device.event()
    mailbox = device.pinned(4, "mail")
    assert event.done()
    mailbox.view[:] = b"good"
    device.cu.check(device.cu.cuMemcpyHtoDAsync_v2(table.address, mailbox.address, 4, one.handle), "copying")
    event.record(one)
    assert not event.done()
    two.wait(event)
    assert two.read(table.address, 4) == b"good"  # had it not waited: four bytes nobody wrote
    assert event.done()
    event.synchronize()
    early, late = device.event(timing=True), device.event(timing=True)
    began = time.monotonic()
    early.record(two)
    early.synchronize()
    time.sleep(0.01)
    late.record(two)
    late.synchronize()
    assert 10 <= late.milliseconds_since(early) <= (time.monotonic() - began) * 1e3
    with pytest.raises(DeviceError, match="reading a time"):
        late.milliseconds_since(event)
    fake.c.fake_violations_forget()
