"""Fields that several kinds share, and the comparison of a table with its schema.

Ids and logprobs are lists whose items cannot be null. So an Arrow list column is values and
offsets, and every tensor made from it shares them without a copy.

Not of the spine: the spine only relies on columns being as the kind's schema says.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from . import cells  # noqa: F401  # registers the type that a user's columns may have
from .errors import SchemaError


def required(name: str, kind: pa.DataType) -> pa.Field:
    """Return a column, or the items of one, that is never null."""
    return pa.field(name, kind, nullable=False)


GROUP_ID = required("group_id", pa.string())
ROLLOUT_ID = required("rollout_id", pa.string())
SAMPLE_INDEX = required("sample_index", pa.int32())
ROLE = required("role", pa.string())
CONTENT = required("content", pa.string())


def token_ids(name: str) -> pa.Field:
    """Return a ragged column of token ids: list<int32>, neither lists nor items null."""
    return required(name, pa.list_(required("item", pa.int32())))


def per_token(name: str) -> pa.Field:
    """Return a ragged float32 column: list<float32>, one per token, neither lists nor items
    null.
    """
    return required(name, pa.list_(required("item", pa.float32())))


def open_struct(name: str) -> pa.Field:
    """Return a struct column with fields of the user's choice; `compare` ignores these."""
    return required(name, pa.struct([]))


def kind_schema(kind: str, fields: list[pa.Field]) -> pa.Schema:
    """Return the schema of `kind`, with its name (`rollouts/1`) in the metadata."""
    return pa.schema(fields, metadata={"quiver": kind})


def kind_of(schema: pa.Schema) -> str:
    """Return the name that `kind_schema` wrote: `rollouts/1`."""
    return schema.metadata[b"quiver"].decode()


def by_name(*schemas: pa.Schema) -> dict[str, pa.Schema]:
    """Return all schemas of a kind by name."""
    return {kind_of(schema): schema for schema in schemas}


def with_struct(schema: pa.Schema, **structs: pa.StructType) -> pa.Schema:
    """Return `schema` with each open struct replaced by the given type, to build a table with."""
    for name, kind in structs.items():
        schema = schema.set(schema.get_field_index(name), required(name, kind))
    return schema


def require_names(fields: Iterable[pa.Field]) -> None:
    """Check the names of columns and struct members. Raises ArrowInvalid.

    A name that is not text, or appears twice, is refused. pyarrow reads such a file, and fails only
    later, when the name is used.
    """
    try:
        fields = list(fields)
        names = [field.name for field in fields]
    except UnicodeDecodeError:
        raise pa.ArrowInvalid("the name of a column is not UTF-8") from None
    if len(set(names)) < len(names):
        raise pa.ArrowInvalid("two columns have the same name")
    for field in fields:
        require_names(field.type.field(index) for index in range(field.type.num_fields))


def fail(schema: pa.Schema, message: str) -> SchemaError:
    """Build a SchemaError about a table that should be of `schema`'s kind."""
    kind = kind_of(schema)
    return SchemaError(
        kind, message, next=f"make the table as schemas/{kind.partition('/')[0]}.py describes it"
    )


def compare(table: pa.Table, schema: pa.Schema, unique: str | None = None) -> None:
    """Raise SchemaError with the difference, unless `table` fits `schema`.

    It fits if it has the columns and types, no forbidden null, and no value twice in the column
    `unique`.
    """
    names = table.column_names
    problems = [f"missing {name}" for name in schema.names if name not in names]
    problems += [f"unexpected {name}" for name in names if name not in schema.names]
    for field in schema:
        if field.name not in names:
            continue
        column = table.column(field.name)
        is_open = field.type == pa.struct([]) and pa.types.is_struct(column.type)
        if not is_open and column.type != field.type:
            problems.append(f"{field.name} is {column.type}, expected {field.type}")
        elif not field.nullable and column.null_count:
            problems.append(f"{field.name} has {column.null_count} nulls, expected none")
        elif pa.types.is_list(field.type) and not field.type.value_field.nullable:
            nulls = pc.list_flatten(column).null_count
            if nulls:
                problems.append(f"{field.name} has {nulls} null items, expected none")
    if problems:
        raise fail(schema, "; ".join(problems))
    if unique and pc.count_distinct(table.column(unique)).as_py() != len(table):
        counts = table.column(unique).value_counts()
        twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))[0]
        raise fail(schema, f"{unique} {twice.as_py()!r} occurs more than once")


def require_same_lengths(table: pa.Table, schema: pa.Schema, first: str, second: str) -> None:
    """Raise SchemaError unless the lists of two columns have equal lengths row by row."""
    first_lengths = pc.list_value_length(table.column(first))
    second_lengths = pc.list_value_length(table.column(second))
    differs = pc.not_equal(first_lengths, second_lengths)
    if pc.any(differs).as_py():
        row = pc.index(differs, True).as_py()
        difference = f"{first} has {first_lengths[row]} items, {second} has {second_lengths[row]}"
        raise fail(schema, f"row {row}: {difference}")


def require_values(table: pa.Table, schema: pa.Schema, name: str, wrong, message: str) -> None:
    """Raise SchemaError if any value of a column is wrong.

    Args:
        wrong: a compute expression that maps the flat values to booleans.
    """
    column = table.column(name)
    values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    is_wrong = wrong(values)
    if pc.any(is_wrong).as_py():  # None if there are no values
        first_wrong = values[pc.index(is_wrong, True).as_py()]
        raise fail(schema, f"{name} holds {first_wrong}: {message}")


def require_finite(
    table: pa.Table, schema: pa.Schema, name: str, least: float | None = None
) -> None:
    """Raise SchemaError if any number is NaN, infinite or below `least`; null is none of these."""
    require_values(table, schema, name, lambda v: pc.invert(pc.is_finite(v)), "a finite number")
    if least is not None:
        require_values(table, schema, name, lambda v: pc.less(v, least), f"at least {least}")


def require_among(table: pa.Table, schema: pa.Schema, name: str, allowed: tuple[str, ...]) -> None:
    """Raise SchemaError unless every text in the column is one of the `allowed`."""
    texts = pa.array(allowed)
    require_values(
        table,
        schema,
        name,
        lambda v: pc.invert(pc.is_in(v, texts)),
        f"one of {', '.join(allowed)}",
    )


def require_logprobs(table: pa.Table, schema: pa.Schema, name: str) -> None:
    """Raise SchemaError for a logprob that is NaN, infinite or above 0 (by more than rounding)."""
    most = pa.scalar(1e-4, pa.float32())  # with another type, Arrow would copy the column into it
    require_finite(table, schema, name)
    require_values(table, schema, name, lambda v: pc.greater(v, most), "a logprob is at most 0")


def require_ids(table: pa.Table, schema: pa.Schema, name: str) -> None:
    """Raise SchemaError for a negative token id."""
    zero = pa.scalar(0, pa.int32())
    require_values(table, schema, name, lambda v: pc.less(v, zero), "a token id is at least 0")
