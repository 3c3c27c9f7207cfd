"""Simulate an NVIDIA card: what a GPU would refuse, where the program would wait for it, and its
use of memory.

    with pretended_gpu() as card:
        train(model.to("cuda"))
    assert card.waiting == {"dpsgd/run.py update"}

Tensors on `cuda` are FakeTensors. They have shapes and types by PyTorch's own rules, which also
refuse to mix devices, but no numbers. Tensors on the CPU are real. Numbers that are copied from the
card to the CPU are made up. There is one card of compute capability 9.0. Results and speed of its
kernels, NCCL and fused optimisers are not simulated. With SFUMATO_REAL_GPU=1, nothing is simulated:
the tests then run on this machine's card.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from sfumato.runtime import compute

CUDA = torch.device("cuda", 0)
GIB = 2**30
# Products on the CPU are counted if their larger tensor has at least this many numbers. To find the
# width of its layers, a network may process a single image, which has fewer numbers.
LARGE = 4000
PRODUCT = tuple(
    f"{Path(__file__).resolve().parents[1] / folder}/" for folder in ("sfumato", "stages")
)
CPU_GENERATOR = torch.Generator
aten = torch.ops.aten
# Operations that are work for the card. On real tensors, the CPU does this work.
PRODUCTS = {
    *(
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._slow_conv2d_forward.default,
    ),
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default),
}

# --- PyTorch's lists for autocast, as far as needed, because autocast ignores fake tensors --------

HALF = {
    *(
        F.linear,
        F.conv2d,
        torch.conv2d,
        F.conv_transpose2d,
        F.scaled_dot_product_attention,
        torch.einsum,
    ),
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv),
}
FULL = {
    *(
        F.group_norm,
        torch.group_norm,
        F.layer_norm,
        torch.norm,
        Tensor.norm,
        torch.linalg.vector_norm,
    ),
    *(
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.binary_cross_entropy_with_logits,
        F.softplus,
        F.cosine_similarity,
    ),
    *(
        F.softmax,
        torch.softmax,
        Tensor.softmax,
        F.log_softmax,
        torch.log_softmax,
        Tensor.log_softmax,
    ),
    *(
        torch.exp,
        Tensor.exp,
        torch.log,
        Tensor.log,
        torch.rsqrt,
        Tensor.rsqrt,
        torch.reciprocal,
        Tensor.reciprocal,
    ),
    *(torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__, torch.logsumexp, Tensor.logsumexp),
    *(torch.sum, Tensor.sum, torch.prod, Tensor.prod, torch.cumsum, Tensor.cumsum),
}
WIDEST = {torch.cat, torch.stack, torch.addcmul, Tensor.addcmul, torch.dot, F.grid_sample}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_card(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


def autocast_type(function: Any, arguments: Any) -> torch.dtype | None:
    """Return the type to which CUDA's autocast casts a function's arguments, or None."""
    types = {
        value.dtype for value in tree_leaves(arguments) if on_card(value) and value.dtype in FLOATS
    }
    if not types:
        return None
    if function in HALF:
        return torch.get_autocast_dtype("cuda")
    wide = function in FULL or (function in WIDEST and len(types) > 1)
    return torch.float32 if wide else None


class Asked(TorchFunctionMode):
    """Imitate what PyTorch does in C++ before it dispatches operators: find the current card, and
    cast under autocast.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tuple(map(with_index, args))
        kwargs = {name: with_index(value) for name, value in (kwargs or {}).items()}
        if function is torch.tensor and kwargs.get("device") == CUDA:
            kwargs.pop("device")
            return function(*args, **kwargs).to(CUDA)
        if (
            not torch.is_autocast_enabled("cuda")
            or (to := autocast_type(function, (args, kwargs))) is None
        ):
            return function(*args, **kwargs)

        def cast(value: Any) -> Any:
            return value.to(to) if on_card(value) and value.dtype in FLOATS else value

        args, kwargs = tree_map(cast, (args, kwargs))
        with torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)


def with_index(value: Any) -> Any:
    """Replace the device `cuda` by the only card."""
    if isinstance(value, torch.device):
        return CUDA if value.type == "cuda" else value
    return CUDA if isinstance(value, str) and value == "cuda" else value


# --- operators ------------------------------------------------------------------------------------


def place() -> tuple[str, int] | None:
    """Return the innermost line of the product that runs now: file and function, and line number.

    Returns None if only a test's own code runs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PRODUCT):
            function = code.co_qualname.split(".<")[0]  # for a lambda, the enclosing function
            return f"{'/'.join(Path(code.co_filename).parts[-2:])} {function}", frame.f_lineno
        frame = frame.f_back
    return None


class Card:
    """A record of what a program did with the card.

    waits: how often the program waited for the card, by place, line and operation; copies: the same
    for copies of memory that is not pinned, from the CPU to the card; on_cpu: how often a product
    or convolution with at least LARGE numbers ran on the CPU, by place; held: number of storages
    that were created in the card's memory; live, peak: present and largest number of bytes there;
    more than `size` raises OutOfMemoryError.
    """

    def __init__(self, size: int) -> None:
        self.size, self.free = size, lambda: (int(0.98 * size) - self.live, size)
        self.waits: Counter[tuple[str, int, str]] = Counter()
        self.copies: Counter[tuple[str, int, str]] = Counter()
        self.on_cpu: Counter[str] = Counter()
        self.live = self.peak = self.held = 0
        self.storages: dict[int, weakref.ref] = {}

    @property
    def waiting(self) -> set[str]:
        """Return the places that waited for the card, by file and function."""
        return {where for where, _, _ in self.waits}

    @property
    def copying(self) -> set[str]:
        """Return the places that copied unpinned memory to the card, by file and function."""
        return {where for where, _, _ in self.copies}

    def waited(self, what: str) -> None:
        if where := place():
            self.waits[*where, what] += 1

    def copied(self, what: str) -> None:
        if where := place():
            self.copies[*where, what] += 1

    def beside(self, tensors: Sequence[Tensor]) -> None:
        """Count a product that runs on the CPU."""
        if max(value.numel() for value in tensors) >= LARGE and (where := place()):
            self.on_cpu[where[0]] += 1

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory until the memory is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self.storages:
            return

        def gone(_: object) -> None:
            self.live -= size
            self.storages.pop(key, None)

        self.storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.held += 1
        self.peak = max(self.peak, self.live)
        if self.live > self.size:
            raise torch.cuda.OutOfMemoryError(
                f"{self.live / GIB:.1f} of {self.size / GIB:.1f} GiB at {place()}"
            )


class Fake(FakeTensorMode):
    def dispatch(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().dispatch(function, types, args, of_card(kwargs or {}))


def of_card(kwargs: dict) -> dict:
    """Replace the device `meta` in the arguments by the card.

    Without `dispatch_device`, PyTorch's C++ code treats fake tensors as tensors on `meta`, so it
    creates further tensors on `meta`, too.
    """
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        return {**kwargs, "device": CUDA}
    return kwargs


class Operators(TorchDispatchMode):
    """A mode that runs operators on the CPU or on the card, copies between them, and makes up
    numbers.
    """

    def __init__(self, fake: FakeTensorMode, card: Card) -> None:
        super().__init__()
        self.fake = fake
        self.card = card
        self.random = CPU_GENERATOR().manual_seed(0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = of_card(dict(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        device = kwargs.get("device")
        upwards = device is not None and torch.device(device).type == "cuda"
        if not upwards and not any(isinstance(value, FakeTensor) for value in tensors):
            if function in PRODUCTS:
                self.card.beside(tensors)
            with _disable_current_modes():
                return function(
                    *args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
                )
        if function in ANSWERS:
            self.card.waited(function._schema.name)
            return ANSWERS[function](*args, **kwargs)
        if function in (aten.lift.default, aten.lift_fresh.default):
            return args[0]
        if function in (aten._to_copy.default, aten.copy_.default):
            return self.copy(function, args, kwargs, upwards)
        if function in INDEXING:
            args = (args[0], [self.index(part, on_card(args[0])) for part in args[1]], *args[2:])
            if len(args) > 2 and args[2].ndim and on_card(args[0]) and not on_card(args[2]):
                raise RuntimeError("index_put_ of values of the CPU into a tensor of the card")
            if len(args) > 2 and args[2].ndim:  # the number of rows may be made up: use one row
                args = (*args[:2], args[2][:1], *args[3:])
        return self.run(function, args, kwargs)

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*self.up(args), **self.up(kwargs))
        for value in tree_leaves(result):
            if on_card(value):
                self.card.hold(value)
        return result

    def up(self, values: Any) -> Any:
        """Convert real tensors to fake tensors on the CPU.

        So PyTorch itself decides whether they match the card's tensors.
        """

        def one(value: Any) -> Any:
            real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            return self.fake.from_tensor(value) if real else value

        return tree_map(one, values)

    def copy(self, function: Any, args: Any, kwargs: Any, upwards: bool) -> Any:
        """Copy a tensor within the card, or between the CPU and the card."""
        into = function is aten.copy_.default
        target, source = args[:2] if into else (None, args[0])
        down = on_card(source) and (
            not on_card(target) if into else not upwards and kwargs.get("device") is not None
        )
        if down:
            self.card.waited("to the CPU")
            made_up = self.made_up(source)
            with _disable_current_modes():
                return (
                    target.copy_(made_up)
                    if into
                    else made_up.to(kwargs.get("dtype") or made_up.dtype)
                )
        asynchronous = getattr(source, "pinned", False) and kwargs.get("non_blocking")
        if not on_card(source) and not asynchronous and source.numel():
            self.card.copied("to the card")
        return self.run(function, args, kwargs)

    def made_up(self, source: Tensor) -> Tensor:
        """Make up a tensor of the same shape and type on the CPU.

        Floats are random in [0, 1), integers are 0, and booleans are True.
        """
        with _disable_current_modes():
            shape = tuple(source.shape)
            if source.dtype.is_floating_point:
                return torch.rand(shape, generator=self.random).to(source.dtype)
            return torch.full(shape, source.dtype == torch.bool, dtype=source.dtype)

    def index(self, part: Tensor | None, card: bool) -> Tensor | None:
        """Convert an index to row numbers, on the card if the indexed tensor is there.

        A boolean index on the card selects half of the rows. Their numbers are made up.
        """
        if isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim > 1:
            raise NotImplementedError("an index by truths of several dimensions")
        if isinstance(part, Tensor) and not isinstance(part, FakeTensor):
            with _disable_current_modes():
                numbers = part.nonzero()[:, 0] if part.dtype == torch.bool else part
            if card:
                self.card.copied("an index")
            return self.up(numbers).to(CUDA) if card else self.up(numbers)
        if part is not None and part.dtype == torch.bool:
            self.card.waited("aten::index by truths")
            return integers(part, max(1, len(part) // 2))
        return part


def any_number(tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 1


def integers(tensor: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=tensor.device)


# Operators that wait for the card, because the values of a tensor decide their result or its size
ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: any_number,
    aten.equal.default: lambda first, second: False,
    aten.nonzero.default: lambda tensor: integers(tensor, tensor.numel(), tensor.ndim),
    aten.masked_select.default: lambda tensor, mask: tensor.flatten(),
    aten.bincount.default: lambda tensor, weights=None, minlength=0: integers(
        tensor, minlength or 10
    ),
    aten._unique2.default: lambda tensor, *how: (
        tensor.flatten()[:10],
        integers(tensor, *tensor.shape),
        integers(tensor, min(10, tensor.numel())),
    ),
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


# --- the card -------------------------------------------------------------------------------------


class Generator(CPU_GENERATOR):
    """A generator that claims to be on the card."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.claimed = with_index(torch.device(device))

    @property
    def device(self) -> torch.device:
        return self.claimed


def apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace `nn.Module._apply`: create new parameters, because a real one cannot move to the
    card.
    """
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                with torch.no_grad():
                    moved = function(value)
                part._parameters[name] = nn.Parameter(moved.detach(), value.requires_grad)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = function(value)
    return module


def pinned(tensor: Tensor) -> Tensor:
    tensor.pinned = True  # type: ignore[attr-defined]
    return tensor


def torch_cuda(card: Card) -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of `torch.cuda`, by name."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *about: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *device: "a pretended card",
        "get_device_capability": lambda *device: (9, 0),
        "mem_get_info": lambda *device: card.free(),
        "memory_reserved": lambda *device: 0,
        "memory_allocated": lambda *device: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda *device: card.waited("synchronize"),
        "get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *state: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


def patches(card: Card) -> Iterator[Any]:
    """Yield patches of all places where PyTorch would call a driver."""
    make = Tensor._make_subclass

    def without_dispatch(cls: type, data: Tensor, *about: Any, **options: Any) -> Any:
        """Make a tensor. `dispatch_device` is off for a FakeTensor, because with it autograd starts
        a thread per card.
        """
        return make(
            cls, data, *about, **options | ({"dispatch_device": False} if cls is FakeTensor else {})
        )

    yield mock.patch.object(Tensor, "_make_subclass", staticmethod(without_dispatch))
    yield mock.patch.object(Tensor, "pin_memory", lambda tensor, *device: pinned(tensor))
    for kind in ("cuda", "cpu", "meta"):
        is_kind = property(lambda tensor, kind=kind: tensor.fake_device.type == kind)
        yield mock.patch.object(FakeTensor, f"is_{kind}", is_kind, create=True)
    yield mock.patch.object(torch, "Generator", Generator)
    yield mock.patch.object(nn.Module, "_apply", apply)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        yield mock.patch.object(torch.optim.Optimizer, name, lambda optimiser: None, create=True)
    yield mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for name, answer in torch_cuda(card).items():
        yield mock.patch.object(torch.cuda, name, answer)


class RealCard(Card):
    """This machine's card. Of the counts, only `held` is measured."""

    @property
    def held(self) -> int:
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0)

    @held.setter
    def held(self, value: int) -> None:
        assert value == 0


@contextmanager
def pretended_gpu(size: int = 80 * GIB) -> Iterator[Card]:
    """Simulate one card with `size` bytes of memory inside the context."""
    if os.environ.get("SFUMATO_REAL_GPU") == "1":
        yield RealCard(size)
        return
    card = Card(size)
    fake = Fake(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for patch in patches(card):
            stack.enter_context(patch)
        stack.callback(compute.no_cuda.cache_clear)
        compute.no_cuda.cache_clear()
        modes: Sequence[Any] = (fake, Operators(fake, card), Asked())
        for mode in modes:
            stack.enter_context(mode)
        yield card
