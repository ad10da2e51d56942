"""The constructors of all pools: arguments that they take, and those that they refuse without a trace."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import STORAGE, cuda_only
from pool_table import Case, each, each_size, every_pool

import kvpool
from kvpool import ConfigError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from software import Driver

pytestmark = pytest.mark.usefixtures("device")
without_a_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@every_pool
def test_properties_are_the_arguments_and_read_only(case: Case) -> None:
    pool = case.make()
    assert isinstance(pool, kvpool.Pool)
    for size, value in case.sizes.items():
        if size not in {"chunk_shape", "initial_pages", "max_reqs"}:
            assert getattr(pool, size) == value
    assert pool.device == case.place
    assert repr(pool).startswith(f"{case.cls.__name__}(")
    if case.cls not in {kvpool.ChunkPool, kvpool.HostTier, kvpool.ArenaHostTier}:
        assert f"device='{pool.device}'" in repr(pool)
    properties = [name for name, _ in inspect.getmembers(case.cls, inspect.isdatadescriptor)]
    for name in properties:
        if name != "name" and not name.startswith("__"):
            with pytest.raises(AttributeError):
                setattr(pool, name, getattr(pool, name))


@every_pool
def test_a_pool_has_a_unit_and_a_name_by_which_it_is_known(case: Case) -> None:
    pools = [case.make(), case.make()]
    assert [pool.unit for pool in pools] == [case.unit] * 2
    names = [pool.name for pool in pools]
    assert names[0] != names[1]
    assert {re.sub(r"-\d+$", "", name) for name in names} == {case.cls.__name__}
    assert {id(pool) for pool in pools} <= {id(pool) for pool in kvpool.pools()}
    pools[0].name = "other"
    assert pools.pop(0).name == "other"
    del pools
    assert not {*names, "other"} & {pool.name for pool in kvpool.pools()}


@each("take")
def test_strict_is_what_was_asked_for(case: Case) -> None:
    assert [case.make().strict, case.make(strict=False).strict, case.make(strict=True).strict] == [
        False,
        False,
        True,
    ]


@every_pool
def test_a_pool_without_frees_is_not_strict_and_one_of_buffers_always(case: Case) -> None:
    assert case.make().strict is (case.cls is kvpool.BufferPool)


@each_size()
def test_rejects_bad_sizes(case: Case, size: str) -> None:
    for bad in (0, -1, -(10**30), 10**30):
        if bad or size not in case.may_be_zero:
            # An extent is told as the nearest of 64 bits.
            told = r"\d{10}" if size == "chunk_shape" and abs(bad) > 1 else str(bad)
            with pytest.raises((ConfigError, OutOfMemoryError), match=told):
                case.make(**{size: bad})
    if size != "grow":
        with pytest.raises((ConfigError, OutOfMemoryError), match=r"\d{10}"):
            case.make(**{size: 1 << 62})


@each_size()
@pytest.mark.parametrize("bad", [1.0, "1", None, float("nan"), object()], ids=lambda bad: type(bad).__name__)
def test_rejects_sizes_of_a_wrong_type(case: Case, size: str, bad: object) -> None:
    if bad is None and case.parameters[size].default is None:
        return
    with pytest.raises(TypeError):
        case.make(**{size: bad})


@every_pool
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_numbers_of_numpy_are_sizes(case: Case, kind: Callable[[int], Any]) -> None:
    pool = case.make(**{size: kind(value) for size, value in case.sizes.items()})
    assert pool.stats() == case.make().stats()


@each("too_large")
def test_rejects_more_memory_than_any_machine_has(case: Case) -> None:
    with pytest.raises(OutOfMemoryError, match=r"\d{15}"):
        case.make(**case.too_large)


@each("too_large")
def test_rejects_more_bytes_than_an_address_can_name(case: Case) -> None:
    for exponent in (31, 61) if len(case.too_large) > 1 else (61,):
        with pytest.raises((ConfigError, OutOfMemoryError), match=r"\d{10}"):
            case.make(**dict.fromkeys(case.too_large, 1 << exponent))


@each("dtype")
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_memory_is_zero_and_of_the_dtype(case: Case, dtype: torch.dtype) -> None:
    pool = case.make(dtype=dtype)
    assert pool.dtype is dtype
    tensors = case.tensors(pool)
    assert tensors[0].dtype is dtype
    for tensor in tensors:
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == devices.current()
        assert tensor.is_contiguous()
        assert not tensor.view(torch.uint8).any()


def dtypes_of_ml_dtypes() -> list[tuple[object, torch.dtype]]:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    return [(np.dtype(getattr(ml_dtypes, name)), getattr(torch, name)) for name in names]


@each("dtype")
def test_every_way_to_write_a_dtype(case: Case) -> None:
    ways: list[tuple[object, torch.dtype]] = [(str(dtype)[6:], dtype) for dtype in STORAGE]
    ways += [(str(dtype), dtype) for dtype in STORAGE]
    ways += [(np.float16, torch.float16), (np.dtype("float16"), torch.float16), (np.int8, torch.int8)]
    for written, dtype in [*ways, *dtypes_of_ml_dtypes()]:
        assert case.make(dtype=written).dtype is dtype


@each("dtype")
def test_rejects_dtypes_that_are_not_for_storage(case: Case) -> None:
    wrong = (
        torch.float64,
        "float64",
        torch.int32,
        "int32",
        torch.int64,
        torch.bool,
        "complex64",
        "float99",
        "",
    )
    for bad in (*wrong, 3, 1.5, object()):
        with pytest.raises((ConfigError, TypeError)):
            case.make(dtype=bad)


@each("takes_device")
def test_every_way_to_write_a_device(case: Case) -> None:
    for written in (case.place, torch.device(case.place), torch.device(devices.current())):
        assert case.make(device=written).device == case.place


@each("takes_device")
@devices.cpu_only
def test_rejects_devices_that_are_none(case: Case) -> None:
    for bad in (
        "tpu",
        "gpu",
        "mps",
        "",
        "cpu:x",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:+1",
        "cuda: 1",
        "cuda:1.0",
    ):
        with pytest.raises(ConfigError, match="device"):
            case.make(device=bad)
    for wrong in (3, 1.5, b"cpu", object()):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            case.make(device=wrong)


@each("takes_device")
@devices.cpu_only
@without_a_driver
def test_without_a_driver_says_what_was_looked_for(case: Case) -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda:1")):
        with pytest.raises(kvpool.BackendUnavailableError, match=r'libcuda.*device="cpu"'):
            case.make(device=device)
    if case.parameters["device"].default == "cuda":
        dtype = {"dtype": case.dtype} if case.dtype else {}
        with pytest.raises(kvpool.BackendUnavailableError, match="libcuda"):
            case.cls(**case.given, **case.sizes, **dtype)


@every_pool
@devices.cpu_only
def test_defaults_are_what_the_signature_says(case: Case) -> None:
    device = {"device": "cpu"} if case.takes_device else case.below("cpu")
    given = {**case.given, **case.sizes, **device}
    needed = {
        name: given[name]
        for name, parameter in case.parameters.items()
        if name in given and (parameter.default is inspect.Parameter.empty or name == "device")
    }
    dtype = {"dtype": "float32"} if case.dtype == "" else {}
    pool = case.cls(**needed, **dtype)
    told_elsewhere = {"device", "pin_memory", "max_pinned", "events"}
    for name, parameter in case.parameters.items():
        if parameter.default not in {inspect.Parameter.empty, None} and name not in told_elsewhere:
            found = getattr(pool, name)
            assert (str(found)[6:] if name.endswith("dtype") else found) == parameter.default


@each("too_large", "on_device")
@cuda_only
def test_out_of_memory_tells_both_numbers_and_leaves_nothing(case: Case, driver: Driver) -> None:
    before = driver.device_bytes()
    driver.set_capacity(before + (1 << 10))
    with pytest.raises(OutOfMemoryError, match=r"\d+ bytes asked for, \d+ of \d+ free on cuda:0"):
        case.make(**case.big)
    assert driver.device_bytes() == before
    driver.set_capacity(64 << 30)
    case.use(case.make(**case.big))
