"""The Triton kernels: each reads its inputs once and writes its outputs once.

All arithmetic is in float32, for every dtype of inputs and outputs. One program handles a whole
row of logits, of a norm or of positions, so no sum depends on the order in which programs end: the
same input gives the same bits. Values that change between micro-batches do not trigger a new
compilation. `operations` describes each kernel's purpose and shapes. Without a GPU, the tests run
the kernels in Triton's interpreter and compile them for a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

_OF_ROWS = ["targets", "factors", "logprobs", "spreads", "largest", "log_totals"]
_OF_ROWS += ["target_minus_one", "entropy", "grads", "entropy_grads"]
"""Arguments whose alignment depends on the number of rows; Triton would compile again for it."""


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def head_kernel(
    logits,
    targets,
    factors,
    logprobs,
    spreads,
    largest,
    log_totals,
    row_stride,
    num_ids,
    COLLISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For a row z of logits times its factor, compute the head's results in one pass.

    These are log softmax(z)[target], the entropy or Σ p², max z, and log Σ exp(z − max z). Each
    lane has its own maximum and sums until the end of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    factor = tl.load(factors + row)
    lanes = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp(z − most)
    # sum of (z − most) exp(z − most); for COLLISION of exp(z − most)²
    second = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_ids, BLOCK):
        places = start + lanes
        z = tl.load(logits + places, mask=places < num_ids, other=float("-inf")).to(tl.float32)
        z = z * factor
        higher = tl.maximum(most, z)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # avoids −inf − −inf, which is NaN
        decay = tl.exp(most - base)
        gap = z - base
        weight = tl.exp(gap)
        if COLLISION:
            second = second * decay * decay + weight * weight
        else:
            drop = tl.where(most == float("-inf"), 0.0, most - base)
            second = decay * (second + drop * total) + tl.where(weight > 0, gap * weight, 0.0)
        total = total * decay + weight
        most = higher
    top = tl.max(most, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.exp(most - base)
    row_total = tl.sum(total * decay, 0)
    if COLLISION:
        spread = tl.sum(second * decay * decay, 0) / (row_total * row_total)
    else:
        drop = tl.where(most == float("-inf"), 0.0, most - base)
        row_second = tl.sum(decay * (second + drop * total), 0)
        spread = tl.log(row_total) - row_second / row_total
    picked = tl.load(logits + tl.load(targets + row)).to(tl.float32) * factor
    tl.store(logprobs + row, picked - base - tl.log(row_total))
    tl.store(spreads + row, spread)
    tl.store(largest + row, base)
    tl.store(log_totals + row, tl.log(row_total))


@triton.jit(do_not_specialize_on_alignment=_OF_ROWS)
def head_slope_kernel(
    logits,
    slopes,
    targets,
    factors,
    target_minus_one,
    entropy,
    largest,
    log_totals,
    grads,
    entropy_grads,
    row_stride,
    num_ids,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient with respect to a block of a row's logits.

    With g and h the gradients of logprob and entropy, it is g · factor · (target − p), where target
    is 1 at the target and else 0. If `ENTROPY`, −h · factor · p (log p + H) is added.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_id = places < num_ids
    factor = tl.load(factors + row)
    z = tl.load(logits + row * row_stride + places, mask=is_id, other=float("-inf"))
    log_p = z.to(tl.float32) * factor - tl.load(largest + row) - tl.load(log_totals + row)
    p = tl.exp(log_p)
    is_target = places == tl.load(targets + row)
    # p − 1, exact also where p is near 1
    slope = tl.where(is_target, tl.load(target_minus_one + row), p)
    slope = slope * (-tl.load(grads + row) * factor)
    if ENTROPY:
        unlikely = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
        slope += unlikely * (-tl.load(entropy_grads + row) * factor)
    places_of_row = row * num_ids + places
    tl.store(slopes + places_of_row, slope.to(slopes.dtype.element_ty), mask=is_id)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    states,
    branch,
    weight,
    total,
    output,
    scales,
    epsilon,
    num_rows,
    num_heads,
    token_stride,
    head_stride,
    width,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute weight · x / rms(x) of some rows.

    x / rms(x) is first rounded to the dtype of x, as in transformers. If `ADD`, x is the sum of the
    states and a branch, which is written too.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    starts = rows // num_heads * token_stride + rows % num_heads * head_stride
    places = rows[:, None] * width + columns[None, :]
    x = tl.load(states + starts[:, None] + columns[None, :], mask=is_inside, other=0.0)
    if ADD:
        added = tl.load(branch + places, mask=is_inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + places, x, mask=is_inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / width + epsilon)
    normal = (wide * scale[:, None]).to(x.dtype).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(output + places, (normal * w[None, :]).to(output.dtype.element_ty), mask=is_inside)
    tl.store(scales + rows, scale, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_turns"])
def norm_slope_kernel(
    grad,
    total_grad,
    states,
    weight,
    scales,
    grad_states,
    grad_branch,
    grad_weights,
    num_rows,
    num_heads,
    token_stride,
    head_stride,
    width,
    num_turns,
    ADD: tl.constexpr,
    TWICE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of weight · x / rms(x), with r = 1 / rms(x).

    With respect to x: r · w · g − x · r³ · mean(x · w · g). With respect to w: the sum of
    r · x · g; each program has its own rows and writes its share of this sum. If `ADD`, another
    gradient is added to the gradient of x. If `TWICE`, it is also written in the branch's dtype.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for turn in range(0, num_turns):
        rows = (program * num_turns + turn) * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_rows
        is_inside = is_row[:, None] & is_column[None, :]
        starts = rows // num_heads * token_stride + rows % num_heads * head_stride
        places = rows[:, None] * width + columns[None, :]
        x = tl.load(states + starts[:, None] + columns[None, :], mask=is_inside, other=0.0)
        x = x.to(tl.float32)
        g = tl.load(grad + places, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
        share += tl.sum(g * x * scale, 0)
        slope = g * w[None, :]
        mean = tl.sum(x * slope, 1)[:, None] / width
        slope = slope * scale - x * (scale * scale * scale * mean)
        if ADD:
            slope += tl.load(total_grad + places, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(grad_states + places, slope.to(grad_states.dtype.element_ty), mask=is_inside)
        if TWICE:
            tl.store(grad_branch + places, slope.to(grad_branch.dtype.element_ty), mask=is_inside)
    tl.store(grad_weights + program * width + columns, share, mask=is_column)


@triton.jit
def gate_kernel(gate, up, output, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """Compute silu(gate) · up; silu(gate) is rounded first, as in transformers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    a = tl.load(gate + row * gate_stride + columns, mask=is_inside, other=0.0)
    b = tl.load(up + row * up_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    wide = a.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(a.dtype).to(tl.float32)
    tl.store(output + row * width + columns, (silu * b).to(output.dtype.element_ty), mask=is_inside)


@triton.jit
def gate_slope_kernel(
    grad,
    gate,
    up,
    both_grads,
    output,
    grad_stride,
    gate_stride,
    up_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of gate and up, side by side in one row, and silu(gate) · up again."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    g = tl.load(grad + row * grad_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    a = tl.load(gate + row * gate_stride + columns, mask=is_inside, other=0.0)
    b = tl.load(up + row * up_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    wide = a.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * sigmoid).to(a.dtype).to(tl.float32)
    slope = g * b * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    dtype = output.dtype.element_ty
    tl.store(both_grads + row * 2 * width + columns, slope.to(dtype), mask=is_inside)
    tl.store(both_grads + row * 2 * width + width + columns, (g * silu).to(dtype), mask=is_inside)
    tl.store(output + row * width + columns, (silu * b).to(dtype), mask=is_inside)


@triton.jit
def _rotate_heads(
    states,
    before,
    weight,
    output,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    tokens,
    is_token,
    num_heads,
    token_stride,
    head_stride,
    before_token_stride,
    before_head_stride,
    half,
    epsilon,
    INVERSE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate all heads of some tokens; return both halves of the gradient of a norm's weight."""
    columns = tl.arange(0, BLOCK)
    is_inside = is_token[:, None] & (columns < half)[None, :]
    share_low = tl.zeros([BLOCK], tl.float32)
    share_high = tl.zeros([BLOCK], tl.float32)
    if NORM:
        w_low = tl.load(weight + columns, mask=columns < half, other=0.0).to(tl.float32)[None, :]
        w_high = tl.load(weight + half + columns, mask=columns < half, other=0.0)
        w_high = w_high.to(tl.float32)[None, :]
    for head in range(0, num_heads):
        places = tokens[:, None] * token_stride + head * head_stride + columns[None, :]
        low = tl.load(states + places, mask=is_inside, other=0.0).to(tl.float32)
        high = tl.load(states + places + half, mask=is_inside, other=0.0).to(tl.float32)
        if NORM:
            x_low = low
            x_high = high
            if INVERSE:
                places = tokens[:, None] * before_token_stride + head * before_head_stride
                places += columns[None, :]
                x_low = tl.load(before + places, mask=is_inside, other=0.0).to(tl.float32)
                x_high = tl.load(before + places + half, mask=is_inside, other=0.0).to(tl.float32)
            squares = tl.sum(x_low * x_low, 1) + tl.sum(x_high * x_high, 1)
            scale = (1.0 / tl.sqrt(squares / (2 * half) + epsilon))[:, None]
            if not INVERSE:
                dtype = states.dtype.element_ty
                low = (low * scale).to(dtype).to(tl.float32) * w_low
                high = (high * scale).to(dtype).to(tl.float32) * w_high
        if INVERSE:
            new_low = low * cos_low + high * sin_high
            new_high = high * cos_high - low * sin_low
            if NORM:
                share_low += tl.sum(new_low * x_low * scale, 0)
                share_high += tl.sum(new_high * x_high * scale, 0)
                new_low *= w_low
                new_high *= w_high
                mean = tl.sum(x_low * new_low, 1) + tl.sum(x_high * new_high, 1)
                factor = scale * scale * scale * (mean / (2 * half))[:, None]
                new_low = new_low * scale - x_low * factor
                new_high = new_high * scale - x_high * factor
        else:
            new_low = low * cos_low - high * sin_low
            new_high = high * cos_high + low * sin_high
        places = (tokens[:, None] * num_heads + head) * (2 * half) + columns[None, :]
        dtype = output.dtype.element_ty
        tl.store(output + places, new_low.to(dtype), mask=is_inside)
        tl.store(output + places + half, new_high.to(dtype), mask=is_inside)
    return share_low, share_high


@triton.jit(do_not_specialize=["num_tokens", "num_turns"])
def rotate_kernel(
    queries,
    keys,
    cosines,
    sines,
    new_queries,
    new_keys,
    queries_before,
    keys_before,
    query_weight,
    key_weight,
    shares,
    num_tokens,
    num_turns,
    num_query_heads,
    num_key_heads,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    query_before_stride,
    query_before_head_stride,
    key_before_stride,
    key_before_head_stride,
    half,
    epsilon,
    INVERSE: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply rotary positions to all heads of some tokens.

    For the two halves of a head: (a, b) → (a cos − b sin, b cos + a sin). If `INVERSE`, apply the
    transpose, which is the gradient. If `NORM`, heads are normalized first, as by `norm_kernel`;
    its gradient needs the heads before the norm, and each program writes its share of the gradients
    of the weights.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    query_low = tl.zeros([BLOCK], tl.float32)
    query_high = tl.zeros([BLOCK], tl.float32)
    key_low = tl.zeros([BLOCK], tl.float32)
    key_high = tl.zeros([BLOCK], tl.float32)
    for turn in range(0, num_turns):
        tokens = (program * num_turns + turn) * TOKENS + tl.arange(0, TOKENS)
        is_token = tokens < num_tokens
        is_inside = is_token[:, None] & (columns < half)[None, :]
        places = tokens[:, None] * (2 * half) + columns[None, :]
        cos_low = tl.load(cosines + places, mask=is_inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cosines + places + half, mask=is_inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sines + places, mask=is_inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sines + places + half, mask=is_inside, other=0.0).to(tl.float32)
        low, high = _rotate_heads(
            queries, queries_before, query_weight, new_queries, cos_low, cos_high, sin_low,
            sin_high, tokens, is_token, num_query_heads, query_stride, query_head_stride,
            query_before_stride, query_before_head_stride, half, epsilon, INVERSE, NORM, BLOCK,
        )  # fmt: skip
        query_low += low
        query_high += high
        low, high = _rotate_heads(
            keys, keys_before, key_weight, new_keys, cos_low, cos_high, sin_low,
            sin_high, tokens, is_token, num_key_heads, key_stride, key_head_stride,
            key_before_stride, key_before_head_stride, half, epsilon, INVERSE, NORM, BLOCK,
        )  # fmt: skip
        key_low += low
        key_high += high
    if NORM and INVERSE:
        is_column = columns < half
        places = shares + program * 4 * half + columns
        tl.store(places, query_low, mask=is_column)
        tl.store(places + half, query_high, mask=is_column)
        tl.store(places + 2 * half, key_low, mask=is_column)
        tl.store(places + 3 * half, key_high, mask=is_column)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_kernel(
    output,
    log_sums,
    more,
    more_log_sums,
    num_tokens,
    num_heads,
    width,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge attention over more keys into `output` and its log-sums, for some tokens of a head.

    The share of the other keys is exp(more log-sum) / (exp(log-sum) + exp(more log-sum)).
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    is_inside = is_token[:, None] & (columns < width)[None, :]
    sums = head * num_tokens + tokens
    old = tl.load(log_sums + sums, mask=is_token, other=0.0)
    added = tl.load(more_log_sums + sums, mask=is_token, other=0.0)
    added = tl.where(tl.abs(added) == float("inf"), float("-inf"), added)
    share = (1.0 / (1.0 + tl.exp(old - added)))[:, None]
    places = (tokens[:, None] * num_heads + head) * width + columns[None, :]
    a = tl.load(output + places, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(more + places, mask=is_inside, other=0.0).to(tl.float32)
    a = tl.where(share > 0, a + share * (b - a), a)
    top = tl.maximum(old, added)
    total = top + tl.log(tl.exp(old - top) + tl.exp(added - top))
    tl.store(output + places, a.to(output.dtype.element_ty), mask=is_inside)
    tl.store(log_sums + sums, total, mask=is_token)
