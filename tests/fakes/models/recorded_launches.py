"""Recorder for the launches of a step, to check that it can be captured, and to replay it like a graph.

The kernels of tests read on the host and allocate, unlike real ones. Therefore a launch counts as one operation on its
tensors.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from tests.fakes.models.torch_kernels import TorchKernels
from tests.fakes.models.torch_sampling import TorchSampling

HOST = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__")
"""Methods of tensors that wait for a device. On a CPU, some of them do nothing."""
READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
COPIES = ("_to_copy", "copy_")
WRITTEN = {
    "write": (3, 4),
    "prologue": (6, 7, 8),
    "attend": (5,),
    "add_rms_norm": (1, 3),
    "gated": (2,),
    "quantized_product": (4,),
}
WRITTEN |= {"write": (3, 4), "product": (4,), "grouped_product": (4,), "weighted_sum": (1,), "sample": (2, 3, 4)}
WRITTEN |= {"route": (4, 5), "align": (1, 2), "assign": (6, 7, 8)}
WRITTEN["quantized_grouped_product"] = (4,)
WRITTEN |= {"dequantize": (1,), "scaled_product": (4,)}
WRITTEN["add_low_rank"] = (3, 5)
WRITTEN |= {"latent_prologue": (6, 7), "turn_queries": (4,), "attend_latent": (4,)}
"""Indexes of the arguments to which a launch writes, by launch."""


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory of ``tensor``."""
    return tensor.untyped_storage().data_ptr()


def tensors_of(arg: Any) -> list[torch.Tensor]:
    """Return the tensors in ``arg``, in order."""
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, tuple | list):
        return [tensor for part in arg for tensor in tensors_of(part)]
    fields = getattr(arg, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in tensors_of(getattr(arg, name))]


class Reads(TorchFunctionMode):
    """Mode that refuses operations that read a tensor on the host. It raises ``error``."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST:
            raise self.error(f"{name} reads on the host")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records each operation with the addresses and shapes of its tensors (``seen``), and how to repeat it (``work``).

    It refuses reads on the host, copies unless ``may_copy`` is set, and writes to tensors other than ``static`` (None
    allows all). New tensors are allowed with ``may_allocate``, because a graph has its own memory for them; their
    addresses are not compared. ``error`` is the type of refusals.
    """

    def __init__(
        self,
        static: list[torch.Tensor] | None,
        *,
        may_allocate: bool = False,
        may_copy: bool = False,
        error: type[Exception] = AssertionError,
    ) -> None:
        super().__init__()
        self.error = error
        self.may_copy = may_copy
        self.reads = Reads(error)
        self.seen: list[tuple[Any, ...]] = []
        self.work: list[Callable[[], object]] = []
        self.static = None if static is None else {storage(tensor) for tensor in static}
        self.may_allocate = may_allocate
        self.allocated: dict[int, torch.Tensor] = {}
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Overwritten memory and its old content, by address."""

    def __enter__(self) -> "Recorder":
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise self.error(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        self.require(name not in READS, f"{name} reads on the host")
        self.require(self.may_copy or name not in COPIES, f"{name} may cross to the host")
        for index, spec in enumerate(func._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                self.check_write(name, kwargs.get(spec.name) if spec.kwarg_only else args[index])
        tensors = tensors_of((*args, *kwargs.values()))
        known = {storage(tensor) for tensor in tensors}
        result = func(*args, **kwargs)
        for out in tensors_of(result):
            self.require(self.may_allocate or storage(out) in known, f"{name} allocates")
            if storage(out) not in known:
                self.allocated[storage(out)] = out

        def again() -> None:
            for out, found in zip(tensors_of(result), tensors_of(func(*args, **kwargs)), strict=True):
                if storage(out) != storage(found):
                    out.copy_(found)

        self.note(name, tensors, [x for x in args if isinstance(x, int | float)], again)
        return result

    def check_write(self, name: str, tensor: torch.Tensor | None) -> None:
        """Refuse writes to tensors that are not static, and record the old content."""
        if tensor is not None and self.static is None and storage(tensor) not in self.before:
            with _disable_current_modes():
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[storage(tensor)] = memory, memory.clone()
        if tensor is not None and self.static is not None:
            may = storage(tensor) in self.static or storage(tensor) in self.allocated
            self.require(may, f"{name} writes to what is not static")

    def launch(self, name: str, launch: functools.partial[None], written: tuple[int, ...]) -> None:
        """Run ``launch`` as one operation that writes to its arguments with the numbers in ``written``."""
        for index in written:
            self.check_write(name, launch.args[index])
        tensors = [tensor for arg in launch.args for tensor in tensors_of(arg)]
        rest = [arg for arg in (*launch.args, *launch.keywords.values()) if isinstance(arg, str | float | int)]
        self.note(name, tensors, rest, launch)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            launch()

    def note(self, name: str, tensors: list[torch.Tensor], rest: list[Any], again: Callable[[], object]) -> None:
        """Record an operation with its ``tensors`` and other arguments."""
        addresses = [0 if storage(tensor) in self.allocated else tensor.data_ptr() for tensor in tensors]
        shapes = [(*tensor.shape, *tensor.stride()) for tensor in tensors]
        self.seen.append((name, *zip(addresses, shapes, strict=True), *rest))
        self.work.append(again)


class RecordedKernels(TorchKernels):
    """Kernels in plain torch. The active ``recorder`` sees each launch as one operation."""

    recorder: Recorder | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        recorder = super().__getattribute__("recorder")
        if recorder is None or name not in WRITTEN:
            return found

        @functools.wraps(found)
        def launch(*args: Any, **options: Any) -> None:
            self.recorder = None  # operations inside a launch are not recorded separately
            try:
                recorder.launch(name, functools.partial(found, *args, **options), WRITTEN[name])
            finally:
                self.recorder = recorder

        return launch


class RecordedSampling(TorchSampling):
    """Sampling kernels in plain torch. The active recorder, if any, sees each launch as one operation."""

    def sample(self, *args: Any, **options: Any) -> None:
        launch = functools.partial(super().sample, *args, **options)
        recorder = _get_current_dispatch_mode()
        if isinstance(recorder, Recorder):
            recorder.launch("sample", launch, WRITTEN["sample"])
        else:
            launch()


class RecordedGraph:
    """A ``Graph`` that repeats its recorded operations on the same tensors. ``kernels`` are those of the captured
    decoder.

    With ``of_modules``, conversions of numbers are allowed, and failures to capture raise the device's errors.
    """

    def __init__(self, kernels: RecordedKernels, *, of_modules: bool = False) -> None:
        error = RuntimeError if of_modules else AssertionError
        self.recorder = Recorder(None, may_allocate=True, may_copy=of_modules, error=error)
        self.replays = 0
        self._kernels = kernels

    def capture(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the captured function, then restore the tensors it has overwritten, because a device runs nothing during
        capture.
        """
        self._kernels.recorder = self.recorder
        try:
            with self.recorder:
                return launch()
        finally:
            self._kernels.recorder = None
            for memory, before in self.recorder.before.values():
                memory.copy_(before)
            self.recorder.before.clear()

    def replay(self) -> None:
        """Repeat the operations in the order of the recording."""
        self.replays += 1
        for again in self.recorder.work:
            again()
