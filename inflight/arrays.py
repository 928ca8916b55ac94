"""Numbers one per token as arrays: bytes on the wire and in files, numpy views in memory, sequences to everyone else.

The arrays behave as immutable lists: they have a length, are iterated, indexed and sliced, and equal any list or tuple
of the same numbers. `values` is the numpy array behind them, for code that handles many tokens.

In msgpack an array is its bytes, little endian; a `Sets` is two of them. Encoders take `to_msgpack` as `enc_hook`,
decoders `from_msgpack` as `dec_hook`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, overload

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_LENGTH = 1 << 20
"""Elements of an array; sets of one `Sets`."""
MAX_SET = 1 << 16
"""Elements of a set, exclusive: its size is a uint16."""


class Array(Sequence[Any]):
    """Base of the arrays of one dimension. Raises ValueError for more than MAX_LENGTH elements or a value that the
    dtype can't hold."""

    dtype: ClassVar[np.dtype[Any]]
    __slots__ = ("values",)

    def __init__(self, values: ArrayLike | Array = ()) -> None:
        self.values: NDArray[Any] = self._checked(values.values if isinstance(values, Array) else values)

    @classmethod
    def _checked(cls, values: ArrayLike) -> NDArray[Any]:
        try:
            with np.errstate(over="ignore"):
                given = np.asarray(values)
                found = np.ascontiguousarray(given, cls.dtype)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"not {cls.dtype} values: {error}") from None
        if found.ndim != 1 or len(found) > MAX_LENGTH:
            raise ValueError(f"an array of shape {found.shape}, allowed are up to {MAX_LENGTH} elements")
        if len(found) and given.dtype.kind not in cls._kinds():
            raise ValueError(f"not {cls.dtype} values: {given.dtype}")
        if given.dtype.kind in "iu" and cls.dtype.kind == "i" and (given != found).any():
            raise ValueError(f"a value of {given.max()} or {given.min()} is beyond {cls.dtype}")
        return found

    @classmethod
    def _kinds(cls) -> str:
        return {"i": "iu", "f": "iuf", "b": "b"}[cls.dtype.kind]

    @classmethod
    def of_bytes(cls, data: Any) -> Self:
        """The array whose bytes `to_msgpack` has made. Raises ValueError for anything else."""
        if not isinstance(data, bytes | memoryview) or len(data) % cls.dtype.itemsize:
            raise ValueError(f"not the bytes of {cls.dtype} values")
        return cls(np.frombuffer(data, cls.dtype))

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> Any:
        return type(self)(self.values[at]) if isinstance(at, slice) else self.values[at].item()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Array):
            return np.array_equal(self.values, other.values)
        if not isinstance(other, list | tuple) or len(other) != len(self):
            return NotImplemented if not isinstance(other, list | tuple) else False
        try:
            return np.array_equal(self.values, type(self)(other).values)
        except ValueError:
            return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tolist()!r})"

    def tolist(self) -> list[Any]:
        """The same as Python's numbers."""
        numbers: list[Any] = self.values.tolist()
        return numbers


class Ints(Array):
    """int32."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype("<i4")
    __slots__ = ()


class Tokens(Ints):
    """int32, not negative: token ids."""

    __slots__ = ()

    @classmethod
    def _checked(cls, values: ArrayLike) -> NDArray[Any]:
        found = super()._checked(values)
        if found.min(initial=0) < 0:
            raise ValueError(f"{found.min()} is no token id")
        return found


class Lags(Ints):
    """int64: differences of versions."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype("<i8")
    __slots__ = ()


class Floats(Array):
    """float32: log-probabilities in nats."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    __slots__ = ()


class Flags(Array):
    """bool: masks."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype("?")
    __slots__ = ()


class Sets(Sequence[Tokens]):
    """A set of token ids for each token: `counts` [T] uint16 and `ids` int32, the sets one after the other."""

    __slots__ = ("counts", "ids")

    def __init__(self, sets: Sequence[Sequence[int]] | Sets = ()) -> None:
        self.counts: NDArray[np.uint16]
        self.ids: NDArray[np.int32]
        if isinstance(sets, Sets):
            self.counts = sets.counts
            self.ids = sets.ids
            return
        sizes = [len(each) for each in sets]
        if max(sizes, default=0) >= MAX_SET or len(sizes) > MAX_LENGTH:
            raise ValueError(f"{len(sizes)} sets of up to {max(sizes)} ids, allowed are {MAX_LENGTH} of {MAX_SET - 1}")
        self.counts = np.array(sizes, "<u2")
        flat = [token for each in sets for token in each]
        self.ids = Tokens(flat).values

    @classmethod
    def packed(cls, counts: NDArray[np.uint16], ids: NDArray[np.int32]) -> Self:
        """Without a copy. Raises ValueError when the counts are not those of the ids."""
        total = int(np.add.reduce(counts, dtype=np.int64))
        if len(counts) > MAX_LENGTH or total != len(ids):
            raise ValueError(f"{len(ids)} ids are not {len(counts)} sets of {total}")
        return cls.of_arrays(counts, ids)

    @classmethod
    def of_arrays(cls, counts: NDArray[np.uint16], ids: NDArray[np.int32]) -> Self:
        """Without a copy or a check, for arrays that are known to belong together."""
        made = cls.__new__(cls)
        made.counts = counts
        made.ids = ids
        return made

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The sets of all parts, one part after the other."""
        return cls.of_arrays(
            np.concatenate([np.empty(0, "<u2"), *(each.counts for each in parts)]),
            np.concatenate([np.empty(0, "<i4"), *(each.ids for each in parts)]),
        )

    def first(self, length: int) -> Self:
        """The first `length` sets, without a copy."""
        counts = self.counts[:length]
        return self.of_arrays(counts, self.ids[: int(counts.sum(dtype=np.int64))])

    @property
    def widest(self) -> int:
        """Size of the largest set; 0 when there is none."""
        return int(self.counts.max(initial=0))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Tokens]:
        ends = np.cumsum(self.counts, dtype=np.int64).tolist()
        return (Tokens(self.ids[end - count : end]) for end, count in zip(ends, self.counts.tolist(), strict=True))

    @overload
    def __getitem__(self, at: int) -> Tokens: ...
    @overload
    def __getitem__(self, at: slice) -> list[Tokens]: ...
    def __getitem__(self, at: int | slice) -> Tokens | list[Tokens]:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sets):
            return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)
        return self.tolist() == list(map(list, other)) if isinstance(other, list | tuple) else NotImplemented

    def __repr__(self) -> str:
        return f"Sets({self.tolist()!r})"

    def tolist(self) -> list[list[int]]:
        """The same as Python's numbers."""
        return [each.tolist() for each in self]


def to_msgpack(value: Any) -> Any:
    """The `enc_hook` of msgpack. Raises TypeError for any other type."""
    if isinstance(value, Array):
        return value.values.view(np.uint8).data
    if isinstance(value, Sets):
        return [value.counts.view(np.uint8).data, value.ids.view(np.uint8).data]
    raise TypeError(f"objects of type {type(value).__name__} can't be encoded")


def from_msgpack(kind: type, data: Any) -> Any:
    """The `dec_hook` of msgpack. Raises ValueError, which msgspec turns into ValidationError, for anything but what
    `to_msgpack` makes; negative token ids are refused here."""
    if kind is Sets:
        if not isinstance(data, list) or len(data) != 2:
            raise ValueError("sets are two arrays: their sizes and their ids")
        counts, ids = data
        if not isinstance(counts, bytes) or len(counts) % 2:
            raise ValueError("not the bytes of uint16 values")
        return Sets.packed(np.frombuffer(counts, "<u2"), Tokens.of_bytes(ids).values)
    if isinstance(kind, type) and issubclass(kind, Array):
        return kind.of_bytes(data)
    raise NotImplementedError(f"{kind} has no decoding")


def convert(record: msgspec.Struct, **kinds: type[Array] | type[Sets]) -> None:
    """For `__post_init__`: makes arrays of fields that were given as other sequences; None stays None.

    Raises ValueError naming the field that can't be converted.
    """
    for name, kind in kinds.items():
        value = getattr(record, name)
        if value is not None and not isinstance(value, kind):
            try:
                msgspec.structs.force_setattr(record, name, kind(value))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
