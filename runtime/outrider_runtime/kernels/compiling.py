"""Compiles what programs are about to launch, several kernels at once: where one waits for the other, a server's start
with nothing in Triton's cache takes a dozen seconds longer.

To learn which kernels those are, the programs are rehearsed: on tensors without memory, launching nothing. So nothing
on the device is read or written. (torch's own FakeTensorMode does as much, but takes seconds to import.)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton import AsyncCompileMode, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider_runtime.layers.alike import one_of_each

log = logging.getLogger(__name__)

MOST_THREADS = 8  # the compiler holds Python's lock for up to a third of its time


def compile_ahead(
    programs: Collection[Callable[[], None]], device: torch.device, report: Callable[[str], None]
) -> None:
    """Of programs on one device, which must not look at their results. Raises nothing: what fails here is left to the
    programs' first run, and fails there if it must."""
    threads, begin = min(MOST_THREADS, len(os.sched_getaffinity(0))), time.monotonic()
    try:
        with ThreadPoolExecutor(threads) as pool, _Loading(pool, device) as compiling:
            with one_of_each(), _launching_nothing(), Rehearsal(device):
                for program in programs:
                    program()
            compiling.begin()
            kernels = len(compiling.raw_futures)
            report(f"compiling {kernels} kernels, {threads} at once")
        report(f"compiled {kernels} kernels in {time.monotonic() - begin:.1f} s")
    except Exception:  # inner parts of torch and Triton are used here, whose errors are of many kinds
        log.warning("kernels are compiled one by one", exc_info=True)


class _Loading(AsyncCompileMode):  # type: ignore[misc]  # Triton is not typed
    """Puts kernels on the device as well, for which Triton up to 3.8 has a C compiler make a launcher of each. Waits
    for begin(): a rehearsal that had to share Python's lock with the compiler would find the last kernels late."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        super().__init__(pool, ignore_errors=True)
        self._device = device
        self._begun = threading.Event()

    def begin(self) -> None:
        self._begun.set()

    def __exit__(self, *raised: object) -> None:
        self.begin()
        super().__exit__(*raised)

    def submit(self, key: object, compile_one: Callable[[], Any], *others: object) -> object:
        def load() -> object:
            self._begun.wait()
            kernel = compile_one()
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    kernel.run  # noqa: B018  # a property that loads
            return kernel

        return super().submit(key, load, *others)


def kept_zeros(count: int, device: torch.device) -> Tensor:
    """[count] int32, which have memory even where a rehearsal is the first to ask for them."""
    with _disable_current_modes():
        return torch.zeros(count, dtype=torch.int32, device=device)


def described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """For a kernel that reads or writes it in blocks of this shape."""
    base = _Place(tensor) if isinstance(tensor, _Shadow) else tensor
    return TensorDescriptor(base, list(tensor.shape), list(tensor.stride()), block)


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own gap, here and below
    """Computes nothing but shapes. What tensors come out have no memory, and say that they are on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to skip, and to skip it takes seconds of imports

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and (first := func._schema.arguments[0].alias_info) is not None and first.is_write:
            return args[0]  # what is written in place has its shape already
        with torch.inference_mode(False):  # so that views are of the kind that tensors from without are
            named = {name: _mapped(_shape, each) for name, each in (kwargs or {}).items()}
            found = _QUICK.get(func, func)(*_mapped(_shape, args), **named)
            return _mapped(lambda shape: _Shadow.of(shape, self._device), found)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _like(x: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


# Shapes that torch finds by what takes two seconds to import; nothing in the runtime's own models needs others of them.
_QUICK: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.linear.default: _product,
    torch.ops.aten.empty_like.default: _like,
    torch.ops.aten.zeros_like.default: _like,
}


class _Shadow(Tensor):
    shape_only: Tensor  # the same on the meta device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    @staticmethod
    def of(shape: Tensor, device: torch.device) -> _Shadow:
        shadow: _Shadow = Tensor._make_wrapper_subclass(
            _Shadow, shape.shape, shape.stride(), shape.storage_offset(), dtype=shape.dtype, device=device
        )
        shadow.shape_only = shape
        return shadow

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> Any:
        raise RuntimeError(f"{func} of what was only rehearsed")

    def data_ptr(self) -> int:
        raise RuntimeError("a launch with what was only rehearsed")


def _shape(tensor: Tensor) -> Tensor:
    if isinstance(tensor, _Shadow):
        return tensor.shape_only
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(elements, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """What an operator takes or gives, where devices become that of shapes. (torch's own way through trees of any kind
    costs more than all the rest.)"""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(change, each) for each in value])
    return value


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Meanwhile a launch only asks the compiler for its kernel: for each once, since asking takes a millisecond."""
    run, asked = JITFunction.run, set[object]()

    def compile_only(kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        args = tuple(_Place(each) if isinstance(each, _Shadow) else each for each in args)
        key = (kernel, *map(_specialized, args), *((name, _specialized(each)) for name, each in options.items()))
        if key not in asked:
            asked.add(key)
            run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


class _Place:
    """Of a tensor without memory, what kernels are specialised by: its type, and an address as aligned as it will be,
    since what torch allocates begins at multiples of far more than 16 bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def _specialized(argument: Any) -> object:
    """What tells arguments apart that may need kernels of their own."""
    if isinstance(argument, (Tensor, _Place)):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    return type(argument), argument  # since 1, 1.0 and True are equal
