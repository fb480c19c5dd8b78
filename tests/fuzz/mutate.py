"""Almost valid messages and random messages, made from descriptors and valid messages with a seeded generator."""

from collections.abc import Callable, Iterator
from random import Random

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.fuzz import values
from tests.fuzz.wire import (
    BYTES,
    END_GROUP,
    FIXED32,
    FIXED64,
    GROUP,
    VARINT,
    Record,
    Tree,
    decode,
    encode,
    varint,
    wire_of,
)

Place = tuple[Tree, int]
_MANY = (65, 257, 1025, 3000)
_MAX_DEPTH = 4


def mutated(seed: bytes, kind: Descriptor, rng: Random) -> bytes:
    """Return a malformed or hostile message of this kind."""
    how = rng.random()
    if how < 0.04:
        return seed
    if how < 0.08:
        return rng.randbytes(rng.choice((1, 2, 5, 20, 200, 3000)))
    if how < 0.18:
        data = encode(random_message(kind, rng))
    else:
        tree = decode(seed, kind)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(tree, kind, rng)
        data = encode(tree)
    if how > 0.94 and data:
        return _damaged(data, rng)
    return data


def random_message(kind: Descriptor, rng: Random, depth: int = 0) -> Tree:
    """Return a message with random fields and values."""
    tree: Tree = []
    for field in kind.fields:
        if rng.random() < (0.5 if depth == 0 else 0.25):
            for _ in range(rng.choice((1, 1, 2, 5)) if field.is_repeated else rng.choice((1, 1, 1, 2))):
                tree.append(random_record(field, rng, depth))
    rng.shuffle(tree)
    return tree


def random_record(field: FieldDescriptor, rng: Random, depth: int = 0) -> Record:
    """Return one hostile value of a field."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = random_message(field.message_type, rng, depth + 1) if depth < _MAX_DEPTH else []
        return Record(field.number, BYTES, inner, field)
    return Record(field.number, wire_of(field), values.scalar(field, rng), field)


def _change(tree: Tree, kind: Descriptor, rng: Random) -> None:
    places = list(_places(tree))
    if not places or rng.random() < 0.2:
        _add(tree, kind, rng)
        return
    _CHANGES[rng.randrange(len(_CHANGES))](rng.choice(places), rng)


def _places(tree: Tree) -> Iterator[Place]:
    for index, record in enumerate(tree):
        yield tree, index
        if isinstance(record.value, list):
            yield from _places(record.value)


def _add(tree: Tree, kind: Descriptor, rng: Random) -> None:
    """Set another field, possibly one that excludes a set field, or an unknown one."""
    inner = [r for r in tree if isinstance(r.value, list) and r.field is not None]
    if inner and rng.random() < 0.7:
        chosen = rng.choice(inner)
        assert isinstance(chosen.value, list)
        _add(chosen.value, chosen.field.message_type, rng)
    elif kind.fields and rng.random() < 0.9:
        tree.insert(rng.randint(0, len(tree)), random_record(rng.choice(list(kind.fields)), rng, 2))
    else:
        number = rng.choice((0, 99, 19_000, 2**29 - 1))
        tree.append(Record(number, BYTES, rng.randbytes(rng.choice((0, 10, 1000)))))


def _revalue(place: Place, rng: Random) -> None:
    tree, index = place
    record = tree[index]
    if record.field is None:
        record.value = rng.randbytes(8)
    elif isinstance(record.value, list):
        if record.field.message_type.fields:
            _add(record.value, record.field.message_type, rng)
    elif record.field.is_packed and record.wire == BYTES:
        record.value = _packed(record.field, rng)
    else:
        record.value = values.scalar(record.field, rng)


def _packed(field: FieldDescriptor, rng: Random) -> bytes:
    wire = wire_of(field)
    if wire != VARINT:
        return rng.randbytes(rng.choice((0, 3, 4, 8, 400)))
    how = rng.random()
    if how < 0.2:
        return b"\xff" * rng.choice((1, 11, 50))
    if how < 0.5:
        return b"".join(varint(rng.randrange(300)) for _ in range(rng.choice((0, 1, 500, 3000))))
    return b"".join(varint(rng.choice(values.NUMBERS)) for _ in range(rng.choice((1, 2, 10))))


def _remove(place: Place, rng: Random) -> None:
    tree, index = place
    del tree[index]


def _repeat(place: Place, rng: Random) -> None:
    """Repeat a field once (a singular field, or a member of the same oneof), or thousands of times."""
    tree, index = place
    count = rng.choice(_MANY) if rng.random() < 0.3 and len(encode([tree[index]])) < 100 else 1
    tree.extend(tree[index].copy() for _ in range(count))


def _retype(place: Place, rng: Random) -> None:
    """Change the wire type of a field."""
    tree, index = place
    record = tree[index]
    wire = rng.choice([w for w in (VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32) if w != record.wire])
    value = {VARINT: 7, FIXED64: b"\xff" * 8, FIXED32: b"\xff" * 4}.get(wire, b"abc")
    tree[index] = Record(record.number, wire, value)


def _nest(place: Place, rng: Random) -> None:
    """Nest messages deeper than the limit of any parser."""
    tree, index = place
    record = tree[index]
    if rng.random() < 0.5:
        tree[index] = Record(record.number, BYTES, (varint(record.number << 3 | GROUP)) * rng.choice((50, 101, 2000)))
        return
    data = b""
    for _ in range(rng.choice((30, 101, 500))):
        data = varint(record.number << 3 | BYTES) + varint(len(data)) + data
    tree[index] = Record(record.number, BYTES, data)


def _scramble(place: Place, rng: Random) -> None:
    tree, index = place
    record = tree[index]
    if record.wire == BYTES:
        record.value = rng.randbytes(rng.choice((0, 1, 4, 100)))
    else:
        rng.shuffle(tree)


_CHANGES: tuple[Callable[[Place, Random], None], ...] = (
    _revalue,
    _revalue,
    _revalue,
    _revalue,
    _revalue,
    _revalue,
    _remove,
    _repeat,
    _retype,
    _nest,
    _scramble,
)


def _damaged(data: bytes, rng: Random) -> bytes:
    """Return the data truncated, or with a flipped bit."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
