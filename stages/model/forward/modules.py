"""Norms, gated MLPs and rotations of the common families: less memory, and kernels on a GPU.

Only `forward` of a module is replaced, and only if a probe shows that the new one computes the
same: by a kernel the module's own numbers and gradients up to rounding, otherwise the same bits. So
a family that computes something else under these names is not changed, and kernels that do not run
are not used.

For an RMSNorm, autograd keeps the input and the normalized input; for a gated MLP it keeps gate,
act(gate), up, and act(gate) · up. Here only the input is kept, or gate and up; the rest is computed
again from them. A layer made of exactly these parts is replaced too if there are kernels, so that
its norms also make the sums of the residual stream and of its gradient.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quiver.stages.model.folder import says_no_memory

from .gpu.choice import agree, fits, precision_of_products, sum_of_shares, uncast
from .projections import Kind, product, product_dtype

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PROBE = 3
"""Positions of a probe."""
_MOST_WIDTH = 16384
"""Largest width of a norm with a kernel, since one program holds a whole row."""
_ROTATION = "apply_rotary_pos_emb"
"""Name of the function that families with rotary positions call to apply them."""
log = logging.getLogger(__name__)


def fuse_modules(model: nn.Module) -> int:
    """Replace modules of `model` if possible, and return how many were replaced.

    Call it in the precision of later passes.
    """
    num_replaced = 0
    problems: dict[str, Exception] = {}
    others: set[str] = set()
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is None or "forward" in vars(module):
            continue
        name = type(module).__name__
        for trial in _trials(module, weight):
            try:
                is_right = trial.succeeds(weight)
            except Exception as error:  # Triton, its compilers and the driver raise many types
                if says_no_memory(error):
                    raise
                problems.setdefault(name, error)
                continue
            if is_right:
                module.forward = trial.forward
                num_replaced += 1
                break
            if not trial.is_exact:
                others.add(name)
    for name, error in problems.items():
        log.warning("%s: its kernels do not run here (%s)", name, error)
    for name in sorted(others):
        log.info("%s: runs without kernels, because they would compute something else", name)
    return num_replaced


def _trials(module: nn.Module, weight: Tensor) -> Iterator[_Trial]:
    """Yield the replacements of a module, the fastest first."""
    norm_width = _norm_width(module)
    mlp_width = _mlp_width(module)
    norm_shapes = ((1, _PROBE, norm_width),)
    mlp_shapes = ((1, _PROBE, mlp_width),)
    if fits(weight):
        if {name for name, _ in module.named_children()} == _PARTS:
            yield from _layer_trials(module)
        yield from _attention_trials(module)
        if 0 < norm_width <= _MOST_WIDTH:
            forward = partial(_normalize, module)
            yield _Trial(forward, forward, module.forward, norm_shapes)
        if mlp_width and _is_silu(module.act_fn):
            forward = partial(_gate, module, True)
            precision = precision_of_products(product_dtype(weight))
            yield _Trial(forward, forward, module.forward, mlp_shapes, precision)
    if norm_width:
        forward = partial(_normalize_plainly, module)
        yield _Trial(forward, forward, module.forward, norm_shapes, is_exact=True)
    if mlp_width:
        forward = partial(_gate, module, False)
        yield _Trial(forward, forward, module.forward, mlp_shapes, is_exact=True)


def _norm_width(module: nn.Module) -> int:
    """Return the width of an RMSNorm, 0 for another module."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1 or not hasattr(module, "variance_epsilon"):
        return 0
    # modules that read more than one tensor, such as a norm with a gate, are left alone
    return len(weight) if len(inspect.signature(module.forward).parameters) == 1 else 0


def _mlp_width(module: nn.Module) -> int:
    """Return the width of a gated MLP's states, 0 for another module."""
    projections = [getattr(module, name, None) for name in _PROJECTIONS]
    if not hasattr(module, "act_fn") or not all(isinstance(p, nn.Module) for p in projections):
        return 0
    is_alone = len(inspect.signature(module.forward).parameters) == 1
    return getattr(projections[0], "in_features", 0) if is_alone else 0


@dataclass(frozen=True)
class _Trial:
    """A replacement for a module's `forward`, and how to try it."""

    forward: Callable
    """Replacement for the module's `forward`."""
    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    theirs: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that `ours` and `theirs` take."""
    precision: torch.dtype | None = None
    """Precision in which numbers and gradients must agree. Default: their own dtype."""
    is_exact: bool = False
    """If true, the outputs must have the same bits."""

    def succeeds(self, like: Tensor) -> bool:
        """True if `ours` runs here and gives the numbers and the gradients of `theirs`.

        Raises what `ours` raises.
        """
        draw = torch.Generator().manual_seed(0)
        probes = [torch.randn(shape, generator=draw).to(like) for shape in self.shapes]
        positions = probes[2:]
        # both dtypes occur in a pass: a layer's output, and a product's output under autocast
        for dtype in {like.dtype, product_dtype(like)}:
            for enlarge in (Tensor.clone, _standing_out):
                states = [enlarge(probe).to(dtype) for probe in probes[:2]]
                try:
                    kind, theirs = _answers(self.theirs, states, positions, self.is_exact)
                except Exception as error:  # a family with other arguments or shapes
                    if says_no_memory(error):
                        raise
                    return False
                our_kind, ours = _answers(self.ours, states, positions, self.is_exact)
                if self.is_exact:
                    is_same = torch.equal(ours[0], theirs[0])
                else:
                    is_same = our_kind == kind and agree(ours, theirs, self.precision)
                if not is_same:
                    return False
        return True


@torch.enable_grad()  # training needs the same gradients
def _answers(
    function: Callable, states: list[Tensor], positions: list[Tensor], outputs_alone: bool
) -> tuple[type, list[Tensor]]:
    """Return the type of `function`'s result, its tensors, and unless `outputs_alone` the gradients
    of their sum with respect to the states."""
    leaves = [tensor.clone().requires_grad_() for tensor in states]
    given = function(*leaves, *positions)
    outputs = [given] if isinstance(given, Tensor) else list(given)
    if outputs_alone:
        return type(given), outputs
    gradients = torch.autograd.grad([output.sum() for output in outputs], leaves)
    return type(given), [*outputs, *gradients]


def _standing_out(probe: Tensor) -> Tensor:
    """Return large states […, d], with one far larger per row, as real models have them.

    Such states show whether something is cut off.
    """
    times = 10 if probe.dtype == torch.float16 else 100  # the products of an MLP must not overflow
    large = times * probe
    large[..., 0] *= times
    return large


# -- RMSNorm


def _normalize_plainly(module: nn.Module, states: Tensor) -> Tensor:
    """[…, d] -> […, d]"""
    return _PlainNorm.apply(states, module.weight, module.variance_epsilon)


class _PlainNorm(torch.autograd.Function):
    """weight · x / rms(x) (Zhang and Sennrich 2019, eq. 4), in float32."""

    @staticmethod
    def forward(ctx, states, weight, epsilon):
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        normal = (wide * scale).to(states.dtype)
        return normal.mul_(weight) if weight.dtype == normal.dtype else weight * normal

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients, with r = 1 / rms(x).

        With respect to x: r · w · g − x · r³ · mean(x · w · g). With respect to w: the sum of
        r · x · g.
        """
        states, weight, scale = ctx.saved_tensors
        wide, grad, scale = (tensor.float().flatten(0, -2) for tensor in (states, grad, scale))
        grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            product = grad * wide
            # `mv` is not affected by settings for fast, less exact products
            if ctx.needs_input_grad[1]:
                grad_weight = product.T.mv(scale[:, 0]).to(weight.dtype)
            slope = product.mv(weight.float())[:, None] * scale.pow(3) / len(weight)
            grad_states = torch.mul(grad, weight, out=product)
            grad_states.mul_(scale).addcmul_(wide, slope, value=-1)
        return grad_states.view(states.shape).to(states.dtype), grad_weight, None


def _normalize(module: nn.Module, states: Tensor) -> Tensor:
    """[…, d] -> […, d], by a kernel."""
    return _add_and_normalize(module, False, states, None)[1]


# -- a layer: sums of the residual stream with the norms that read them

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def _layer_trials(layer: nn.Module) -> Iterator[_Trial]:
    width, *others = map(_norm_width, (layer.input_layernorm, layer.post_attention_layernorm))
    if others != [width] or not 0 < width <= _MOST_WIDTH:
        return
    if not _mlp_width(layer.mlp) or not _is_silu(layer.mlp.act_fn):
        return
    # In such a layer only attention and MLP read the norms. If these begin with joined products,
    # which cast their input, a norm may output autocast's dtype directly. A joined product gives
    # one gradient, so none is summed in that dtype.
    linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    is_narrow = torch.is_autocast_enabled(layer.input_layernorm.weight.device.type) and all(
        hasattr(linear, "group") for linear in linears
    )
    theirs = partial(_in_outline, layer, layer.forward)
    ours = partial(_in_outline, layer, partial(_layer, layer, False))
    yield _Trial(partial(_layer, layer, is_narrow), ours, theirs, ((1, _PROBE, width),))


def _in_outline(layer: nn.Module, forward: Callable, states: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Run a layer's `forward` on states with attention and MLP replaced by simple functions.

    Options that attention receives are marked, and their marks enter the output.
    """
    marks = {
        name: 0.01 * (number + 1)
        for number, name in enumerate(("attention_mask", "position_ids", "position_embeddings"))
    }
    options = {"past_key_values": None, "use_cache": False, **marks, "layout": 0.04}

    def attend(*, hidden_states: Tensor, **given: float | None) -> tuple[Tensor, None]:
        mark = sum(len(name) * (given.get(name) or 0) for name in options)
        return (hidden_states + mark).sin(), None

    parts = {layer.self_attn: attend, layer.mlp: torch.cos}
    before = {part: vars(part).get("forward") for part in parts}
    try:
        for part, simple in parts.items():
            part.forward = simple
        return forward(states, **options)
    finally:
        for part, own in before.items():
            del part.forward
            if own is not None:
                part.forward = own


def _layer(layer: nn.Module, is_narrow: bool, hidden_states: Tensor, **options: object) -> Tensor:
    """[1, L, d] -> [1, L, d]"""
    states, normal = _add_and_normalize(layer.input_layernorm, is_narrow, hidden_states, None)
    attended, *_ = layer.self_attn(hidden_states=normal, **options)
    states, normal = _add_and_normalize(layer.post_attention_layernorm, is_narrow, states, attended)
    return states + layer.mlp(normal)


def _add_and_normalize(
    norm: nn.Module, is_narrow: bool, states: Tensor, branch: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of states and branch (the states if there is no branch), and its norm, in
    autocast's dtype if `is_narrow`."""
    dtype = torch.promote_types(states.dtype, norm.weight.dtype)
    if branch is not None:
        dtype = torch.promote_types(dtype, branch.dtype)
    if is_narrow:
        dtype = product_dtype(states)
    return AddNorm.apply(states, branch, norm.weight, norm.variance_epsilon, dtype)


class AddNorm(torch.autograd.Function):
    """A sum and its RMSNorm, by kernels. The gradients of both are combined in one."""

    @staticmethod
    def forward(ctx, states, branch, weight, epsilon, dtype):
        from .gpu import operations

        if branch is None:
            total = states
            output, scales = operations.norm(states, weight, epsilon, dtype)
        else:
            total, output, scales = operations.add_norm(
                states, branch.contiguous(), weight, epsilon, dtype
            )
        ctx.set_materialize_grads(False)
        ctx.dtypes = states.dtype, None if branch is None else branch.dtype
        ctx.save_for_backward(total, weight, scales)
        return total, output

    @staticmethod
    def backward(ctx, total_grad, grad):
        from .gpu import operations

        total, weight, scales = ctx.saved_tensors
        states_dtype, branch_dtype = ctx.dtypes
        is_other = branch_dtype not in (None, total.dtype)
        grad_total, grad_branch, shares = operations.norm_slope(
            grad.contiguous(),
            None if total_grad is None else total_grad.contiguous(),
            total,
            weight,
            scales,
            branch_dtype if is_other else None,
        )
        if branch_dtype is None:
            grad_branch = None
        elif not is_other:
            grad_branch = grad_total
        grad_weight = sum_of_shares(shares, weight) if ctx.needs_input_grad[2] else None
        return grad_total.to(states_dtype), grad_branch, grad_weight, None, None


# -- the gated MLP


def _is_silu(function: Callable) -> bool:
    """True if `function` is silu, tested alone because small weights in a product would hide it."""
    points = torch.linspace(-6, 6, 25)
    try:
        return torch.allclose(function(points), nn.functional.silu(points))
    except (RuntimeError, TypeError):  # it has weights, or more arguments
        return False


def _gate(module: nn.Module, by_kernels: bool, states: Tensor) -> Tensor:
    """[…, d] -> […, d]"""
    gate = module.gate_proj(states)
    up = module.up_proj(states)
    group = getattr(module.down_proj, "group", None)
    if by_kernels and group is not None:
        return _GatedProduct.apply(gate, up, *group.operands(gate.dtype))

    def project_down(gate: Tensor, up: Tensor) -> Tensor:
        return module.down_proj(Gate.apply(gate, up) if by_kernels else module.act_fn(gate) * up)

    if not torch.is_grad_enabled():
        return project_down(gate, up)
    return checkpoint(project_down, gate, up, use_reentrant=False, preserve_rng_state=False)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up of […, i] as [N, i]."""
    from .gpu import operations

    return operations.gate(gate.flatten(0, -2), up.flatten(0, -2))


def _slopes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, side by side in memory, and the result of `_gated`.

    `grad` is the gradient [N, i] of that result.
    """
    from .gpu import operations

    both, gated = operations.gate_slope(grad, gate.flatten(0, -2), up.flatten(0, -2))
    grad_gate, grad_up = (part.view(gate.shape) for part in both.split(grad.shape[1], 1))
    return grad_gate, grad_up, gated


class Gate(torch.autograd.Function):
    """silu(gate) · up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _gated(gate, up).view(gate.shape)

    @staticmethod
    def backward(ctx, grad):
        grad_gate, grad_up, _ = _slopes(grad.flatten(0, -2).contiguous(), *ctx.saved_tensors)
        return grad_gate, grad_up


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up times the weight of a group of one."""

    @staticmethod
    def forward(ctx, gate, up, weight, bias, *parameters):
        ctx.save_for_backward(gate, up, weight)
        ctx.kind = Kind.of(bias, parameters)
        return product(_gated(gate, up), weight, bias).view(*gate.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        grad_parameters = [None] * len(ctx.kind.parameters)
        with uncast(weight):
            grad = grad.flatten(0, -2)
            grad_gate, grad_up, gated = _slopes(grad @ weight, gate, up)
            if ctx.needs_input_grad[4]:
                grad_parameters = ctx.kind.gradients(grad, gated)
        return grad_gate, grad_up, None, None, *grad_parameters


# -- rotary positions


def _attention_trials(module: nn.Module) -> Iterator[_Trial]:
    own = type(module).forward
    is_called = _ROTATION in getattr(getattr(own, "__code__", None), "co_names", ())
    theirs = getattr(own, "__globals__", {}).get(_ROTATION)
    width = getattr(module, "head_dim", None)
    if not is_called or theirs is None or not isinstance(width, int):
        return
    positions = 1, _PROBE, width
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if [_norm_width(norm) for norm in norms] == [width, width]:
        states = 1, _PROBE, module.q_proj.in_features
        rotation = partial(rotate, theirs, norms=norms)
        normless = types.MethodType(_rebuilt(own, {_ROTATION: rotation}), _Normless(module))
        yield _Trial(
            normless,
            partial(_up_to_attention, module, normless),
            partial(_up_to_attention, module, types.MethodType(own, module)),
            (states, states, positions, positions),
            precision_of_products(module.q_proj.weight.dtype),
        )
    forward = types.MethodType(_rebuilt(own, {_ROTATION: partial(rotate, theirs)}), module)

    def ours(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        # autocast is off, since with it the output would have the dtype of attention's products
        with torch.autocast(arguments[0].device.type, enabled=False):
            return rotate(theirs, *arguments)

    shapes = (1, 3, _PROBE, width), (1, 2, _PROBE, width), positions, positions
    yield _Trial(forward, ours, theirs, shapes)


class _Normless:
    """An attention module without its norms of queries and keys: the rotation makes them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    @staticmethod
    def q_norm(states: Tensor) -> Tensor:
        return states

    k_norm = q_norm


def _rebuilt(own: types.FunctionType, names: dict[str, object]) -> types.FunctionType:
    """Return `own`, the forward pass of attention, with some of its global names replaced."""
    rebuilt = types.FunctionType(
        own.__code__,
        {**own.__globals__, **names},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    rebuilt.__kwdefaults__ = own.__kwdefaults__
    return rebuilt


def _up_to_attention(
    module: nn.Module,
    forward: types.MethodType,
    states: Tensor,
    more: Tensor,
    cosines: Tensor,
    sines: Tensor,
) -> Tensor:
    """Run the forward pass of an attention module with a product of queries and keys in place of
    attention itself."""

    def attend(
        _: object, queries: Tensor, keys: Tensor, *others: object, **options: object
    ) -> tuple[Tensor, None]:
        times = queries.shape[1] // keys.shape[1]
        return (queries * keys.repeat_interleave(times, 1)).transpose(1, 2), None

    interface = types.SimpleNamespace(get_interface=lambda *_: attend)
    outlined = _rebuilt(forward.__func__, {"ALL_ATTENTION_FUNCTIONS": interface})
    # autocast is off, since with it the rotation alone would change the dtype
    with torch.autocast(states.device.type, enabled=False):
        states = (states + more).to(module.q_proj.weight.dtype)
        output, _ = outlined(
            forward.__self__, states, position_embeddings=(cosines, sines), attention_mask=None
        )
    return output


def rotate(
    theirs: Callable,
    queries: Tensor,
    keys: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    norms: Sequence[nn.Module] = (),
    **options: int,
) -> tuple[Tensor, Tensor]:
    """Rotate queries [1, H, L, e] and keys [1, h, L, e], normalized first if there are `norms`, by
    cosines and sines [1, L, e].

    `theirs` handles other shapes. Under autocast the outputs have its dtype, as attention's
    products need them.
    """
    fits_kernel = fits(queries, keys, cosines, sines) and len(queries) == 1 and not options
    shape = 1, queries.shape[2], queries.shape[3]
    if not fits_kernel or cosines.shape != shape or sines.shape != shape:
        if norms:
            queries, keys = norms[0](queries), norms[1](keys)
        return theirs(queries, keys, cosines, sines, **options)
    dtype = torch.promote_types(queries.dtype, cosines.dtype)
    if torch.is_autocast_enabled(queries.device.type):
        dtype = torch.get_autocast_dtype(queries.device.type)
    weights = [norm.weight for norm in norms] or (None, None)
    epsilon = norms[0].variance_epsilon if norms else None
    return _Rotation.apply(queries, keys, *weights, epsilon, cosines, sines, dtype)


class _Rotation(torch.autograd.Function):
    """Rotary positions (Su et al. 2021), after norms if there are weights; the gradient is rotated
    back."""

    @staticmethod
    def forward(ctx, queries, keys, query_weight, key_weight, epsilon, cosines, sines, dtype):
        from .gpu import operations

        heads = [_heads(states) for states in (queries, keys)]
        positions = cosines[0].contiguous(), sines[0].contiguous()
        norms = None
        saved = positions
        if epsilon is not None:
            norms = operations.Norms(query_weight, key_weight, epsilon)
            saved = *positions, *heads, query_weight, key_weight
        ctx.save_for_backward(*saved)
        ctx.dtypes = queries.dtype, keys.dtype
        ctx.epsilon = epsilon
        *turned, _ = operations.rotate(*heads, *positions, (dtype, dtype), norms)
        return tuple(states.transpose(0, 1)[None] for states in turned)

    @staticmethod
    def backward(ctx, *grads):
        from .gpu import operations

        cosines, sines, *others = ctx.saved_tensors
        before, weights = others[:2], others[2:]
        *turned, shares = operations.rotate(
            *map(_heads, grads),
            cosines,
            sines,
            ctx.dtypes,
            operations.Norms(*weights, ctx.epsilon) if weights else None,
            inverse=True,
            before=before,
        )
        grad_weights: list[Tensor | None] = [None, None]
        for index, weight in enumerate(weights):
            if ctx.needs_input_grad[2 + index]:
                grad_weights[index] = sum_of_shares(shares[:, index], weight)
        return *(grad.transpose(0, 1)[None] for grad in turned), *grad_weights, *[None] * 4


def _heads(states: Tensor) -> Tensor:
    """[1, H, L, e] -> [L, H, e], each head contiguous"""
    heads = states[0].transpose(0, 1)
    return heads if heads.stride(-1) == 1 else heads.contiguous()
