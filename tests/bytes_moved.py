"""What a pass moves through a GPU's memory, counted on meta tensors: no number is computed, and no
GPU is needed.

    with Counter(costs) as counter, autocast_on_meta(monkeypatch):
        counter.hold(*model.parameters())
        policy(layout)[0].sum().backward()
    counter.kernels, counter.moved, counter.peak

The rules: an operation is a kernel that reads each tensor given to it and writes each one that it
gives back, once; views and tensors without content are free; products of matrices are counted for
themselves. A kernel of `operations` reads and writes each tensor that it is launched with once.
Another operation that is not torch's own counts what its row of `costs` says; without a row it is
refused, so nothing hides in one.
"""

from __future__ import annotations

import weakref
from collections import Counter as Totals
from collections.abc import Callable, Mapping
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quiver.stages.model.forward.gpu import operations

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
VIEWS = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "lift_fresh",
        "new_empty",
        "permute",
        "reshape",
        "select",
        "set_",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    ]
)
TORCHS_OWN = frozenset({"aten", "prims"})
META = torch.device("meta")


class Counter(TorchDispatchMode):
    """Counts operations on meta tensors while it is entered."""

    def __init__(self, costs: Mapping[str, Callable[..., int]]) -> None:
        """`costs`: of operations that are not torch's own, by name, what their kernels read and
        write in bytes, of the operation's arguments."""
        super().__init__()
        self.costs = costs
        self.kernels = 0
        self.moved = 0
        """Bytes, beside products."""
        self.moved_by_products = 0
        self.bytes_of: Totals[str] = Totals()
        """By operation, products too."""
        self.calls_of: Totals[str] = Totals()
        self.live = 0
        self.peak = 0
        """The most bytes that were alive at once, of what was made here or is held."""
        self._sizes: dict[int, int] = {}

    def __enter__(self):
        self._launch, operations.launch = operations.launch, self._count_launch
        return super().__enter__()

    def __exit__(self, *error):
        operations.launch = self._launch
        return super().__exit__(*error)

    def _count_launch(self, kernel, grid, *arguments, **options):
        tensors = {id(tensor): tensor for tensor in tensors_of(arguments)}
        self._count(kernel.__name__, sum(tensor.nbytes for tensor in tensors.values()))

    def _count(self, name, moved):
        self.kernels += 1
        self.calls_of[name] += 1
        self.bytes_of[name] += moved
        if name in PRODUCTS:
            self.moved_by_products += moved
        else:
            self.moved += moved

    def hold(self, *tensors: torch.Tensor) -> None:
        """Weights, moments and whatever else is alive before: count them from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device == META and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        output = function(*arguments, **keywords)
        namespace, _, name = function.name().partition("::")
        name = name.partition(".")[0]
        written = tensors_of(output)
        touched = tensors_of((arguments, keywords)) + written
        self.hold(*written)
        if name in VIEWS or all(tensor.device != META for tensor in touched):
            return output
        if name in self.costs:
            moved = self.costs[name](*arguments, **keywords)
        elif namespace in TORCHS_OWN:
            moved = sum(tensor.numel() * tensor.element_size() for tensor in touched)
        else:
            raise LookupError(f"{function.name()}: `costs` must say what its kernel moves")
        self._count(name, moved)
        return output


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# -- autocast, which torch does not have for meta tensors


@contextmanager
def autocast_on_meta(monkeypatch):
    """Inside, torch.autocast works on meta tensors, for linear layers and in bfloat16: it casts
    what goes into them, and each weight once."""
    is_on = False
    casts: dict[torch.Tensor, torch.Tensor] = {}
    its_own = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype, torch.equal
    autocast, is_enabled, dtype_of, equal = its_own
    linear = F.linear

    @contextmanager
    def on_meta(enabled):
        nonlocal is_on
        before, is_on = is_on, enabled
        try:
            yield
        finally:
            is_on = before

    def cast(tensor):
        if tensor is None or not (tensor.is_leaf and tensor.requires_grad):
            return tensor if tensor is None else tensor.to(torch.bfloat16)
        if tensor not in casts:
            casts[tensor] = tensor.to(torch.bfloat16)
        return casts[tensor]

    def cast_linear(states, weight, bias=None):
        if is_on and states.device == META:
            states, weight, bias = cast(states), cast(weight), cast(bias)
        return linear(states, weight, bias)

    def autocast_of(device, *arguments, enabled=True, **options):
        if device == "meta":
            return on_meta(enabled)
        return autocast(device, *arguments, enabled=enabled, **options)

    with monkeypatch.context() as patch:
        for namespace in (torch, torch.amp):
            patch.setattr(namespace, "autocast", autocast_of)
        patch.setattr(
            torch, "is_autocast_enabled", lambda of: is_on if of == "meta" else is_enabled(of)
        )
        patch.setattr(
            torch,
            "get_autocast_dtype",
            lambda of: torch.bfloat16 if of == "meta" else dtype_of(of),
        )
        patch.setattr(F, "linear", cast_linear)
        # what is tried on a probe has no numbers on meta
        patch.setattr(
            torch,
            "equal",
            lambda a, b: a.shape == b.shape if META in (a.device, b.device) else equal(a, b),
        )
        yield
