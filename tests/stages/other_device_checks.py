"""Tests on a device beside the CPU where there is no GPU: `python -m
tests.stages.other_device_checks TESTS`.

It computes on the CPU, and refuses what a GPU would refuse: an operation on tensors of which one
lives there and one on the CPU, unless it copies or indexes. The stages' models are put there,
wherever a test's configuration wants them. It stands for the whole process, so nothing
imports this module. It knows nothing of CUDA's kernels, memory and streams: that is for tests/gpu.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from quiver.stages.generate.engines import transformers as hf_engine
from quiver.stages.model import loading as models
from quiver.stages.optimize import accelerator, trainer
from quiver.stages.reward.models import forward

NAME = "other"
aten = torch.ops.aten
_ACROSS = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor}
"""Operations that a GPU, too, does with a tensor of the CPU; numbers, tensors without a dimension,
it takes everywhere."""
_NARROWED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""What autocast does in bfloat16; everything else keeps its dtype."""
_done: set[Any] = set()
"""The operations that the running test did there."""


class _Module(backend_registration._DummyBackendModule):
    """`torch.other`"""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Its random numbers are the CPU's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Tensor(torch.Tensor):
    """One that says that it lives there, around one of the CPU, `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Tensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    # what torch does with a tensor beside its operations, and would do with the wrapper alone

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def set_(self, *given: Any) -> Tensor:
        return Tensor(self.inner.set_(*given))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()


def _call(func, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do the operation on the inner tensors; what comes of it lives where its operands do, or where
    it is asked to."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    there = any(isinstance(each, Tensor) for each in tensors)
    strangers = [
        tuple(each.shape) for each in tensors if not isinstance(each, Tensor) and each.dim()
    ]
    if there and strangers and func not in _ACROSS:
        raise RuntimeError(
            f"{func}: expected all tensors on one device, found tensors of shape {strangers} on "
            "the CPU"
        )
    if there:
        _done.add(func)
    wanted = kwargs.get("device")
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    out = func(*inner_args, **inner_kwargs)
    if func is aten.copy_.default and not isinstance(args[0], Tensor):
        return args[0]
    if not (there if wanted is None else wanted.type == NAME):
        return out
    wrapped = tree_map(lambda each: Tensor(each) if isinstance(each, torch.Tensor) else each, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _inner(given: Any) -> Any:
    if isinstance(given, torch.device):
        return torch.device("cpu")
    return given.inner if isinstance(given, Tensor) else given


def _narrowed(operation):
    """`operation` as autocast does it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def narrow(given: Any) -> Any:
            is_wide = isinstance(given, Tensor) and given.dtype == torch.float32
            return given.to(torch.get_autocast_dtype(NAME)) if is_wide else given

        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return operation(*tree_map(narrow, args), **tree_map(narrow, kwargs))

    return run


class _Made(torch.overrides.TorchFunctionMode):
    """torch.tensor(…, device=…) is made in C++, which finds no kernels there that are not
    Python's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == NAME:
            return func(*args, **{**kwargs, "device": "cpu"}).to(NAME)
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """One of the CPU's, wherever it is asked for."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return torch._C.Generator.__new__(cls, "cpu")


def _install() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    everything, autocast = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _call(func, args, kwargs), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _NARROWED:
        autocast.impl(name, _narrowed(getattr(aten, name).default), "AutocastPrivateUse1")
    torch.Generator = _Generator
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # else tied weights part, as two wrappers
    _Made().__enter__()
    return [everything, autocast]


def _put_models_there() -> None:
    device, make, load = (
        torch.device(NAME, 0),
        accelerator.make_accelerator,
        models.load_model,
    )
    train = trainer.Trainer.train

    def make_accelerator(*arguments):
        AcceleratorState._reset_state(True)
        made = make(*arguments)
        made.state.device = device
        return made

    def load_model(*args: Any, **kwargs: Any) -> torch.nn.Module:
        return load(*args, **{**kwargs, **({"device": device} if "device" in kwargs else {})})

    def train_there(self: trainer.Trainer, *arguments: Any) -> Any:
        outcome = train(self, *arguments)
        assert {parameter.device for parameter in self.policy.parameters()} == {device}, (
            "somebody moved the model away"
        )
        return outcome

    accelerator.make_accelerator, trainer.Trainer.train = make_accelerator, train_there
    models.load_model = hf_engine.load_model = load_model
    for each in (forward.Forward, hf_engine.TransformersEngine):
        each.device = property(lambda self: device, lambda self, asked: None)


_kept = _install()  # a library that nobody holds is gone, and its kernels with it
_put_models_there()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A test that made no product of matrices there fails."""
    _done.clear()
    result = yield
    products = {
        aten.mm.default,
        aten.linear.default,
    }  # the latter in inference mode, which takes nothing apart
    assert products & _done, f"{item.name} computed on the CPU alone"
    return result


def _check() -> None:
    """It computes, and refuses a tensor that was left on the CPU."""
    there = torch.ones(2, 3).to(NAME)
    assert (there @ there.T + torch.tensor(1.0)).tolist() == [[4, 4], [4, 4]]
    assert there[torch.tensor([1])].device.type == NAME
    refused = r"expected all tensors on one device, found tensors of shape \[\(3,\)\] on the CPU"
    with pytest.raises(RuntimeError, match=refused):
        there + torch.ones(3)


if __name__ == "__main__":
    _check()
    sys.exit(pytest.main(sys.argv[1:], plugins=[sys.modules[__name__]]))
