"""The allow-list: which globals a checkpoint's pickles may name, and what each becomes.

`.metadata` of DCP (torch 2.4 to 2.13, any Python) becomes plain records; DCP and `.pt` entries
become numbers, containers, numpy arrays and tensors. Nothing is imported or called on a
pickle's behalf beyond what this table lists, unless the caller says `trust=True`. The opcodes are
the business of `pickle_machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from torchtitan_ckpt.errors import DamagedError, Problem, RefusedError
from torchtitan_ckpt.formats.pickle_machine import interpret
from torchtitan_ckpt.formats.pickle_parts import (
    ByReference,
    Charge,
    Function,
    Malformed,
    Record,
    RecordClass,
    Refused,
    Table,
    check_plain,
)
from torchtitan_ckpt.formats.pickle_values import (
    BUILDERS,
    FUNCTIONS,
    dims,
    is_count,
    memory_format,
)
from torchtitan_ckpt.manifest import ITEM_SIZE

MAX_METADATA_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A dtype as a pickle names it; an entry of manifest.ITEM_SIZE, or one that no reader knows."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of a torch.save archive: its entry `data/<key>`, its dtype (None: bytes), its size
    in elements of that dtype."""

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of a torch.save archive before its data is read. Offsets and strides in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Metadata:
    """DCP's `.metadata`: parts as the pickle gave them, not yet checked against each other.

    Values of `state_dict_metadata` and `storage_data` are records; `fields` opens them.
    """

    state_dict_metadata: Mapping[Any, Any]
    storage_data: Mapping[Any, Any]
    planner_data: Any = None
    version: str | None = None
    checkpoint_id: str | None = None


def fields(record: Any, kind: str) -> Mapping[str, Any]:
    """The fields of a record of the class `kind`; raises `Malformed` for anything else."""
    if type(record) is not Record or record.cls.name != kind:
        found = record.cls.name if type(record) is Record else f"a {type(record).__name__}"
        raise Malformed(f"{found} where a {kind} belongs")
    if record.state is None:
        return {}
    if type(record.state) is not dict:
        raise Malformed(f"a {kind} whose fields are no dict")
    return record.state


def load_metadata(
    source: bytes | IO[bytes], *, where: str = ".metadata", trust: bool = False
) -> Metadata:
    """Read the bytes of a `.metadata`. Raises `DamagedError` or `RefusedError`.

    `trust=True` also imports and calls what the table does not list; the file can then run code.
    """
    data = source if isinstance(source, bytes) else source.read(MAX_METADATA_BYTES + 1)
    if len(data) > MAX_METADATA_BYTES:
        raise RefusedError(
            Problem(code="pickle.too-large", what="over 2 GiB of metadata", where=where)
        )
    if not data:
        raise DamagedError(
            Problem(
                code="pickle.empty",
                what="the file is empty",
                where=where,
                cause="an interrupted write or copy, or a full disk",
                fix="use another step, or copy the file again",
            )
        )
    if data[0] != 0x80:
        raise DamagedError(
            Problem(
                code="pickle.not-a-pickle",
                what="the file is not a pickle",
                where=where,
                expected="a first byte of 0x80",
                actual=f"0x{data[0]:02x}",
                fix="copy the file again, or use another step",
            )
        )
    root = interpret(data, Table(_METADATA, BUILDERS, trust=trust), where=where)
    try:
        parts = fields(root, "Metadata")
        tensors, storage = parts.get("state_dict_metadata"), parts.get("storage_data")
        if not isinstance(tensors, dict) or not isinstance(storage, dict):
            raise Malformed("no table of tensors, or no table of where they are stored")
        meta = parts.get("storage_meta")
        origin = None if meta is None else fields(meta, "StorageMeta").get("checkpoint_id")
    except Malformed as error:
        raise DamagedError(
            Problem(code="pickle.malformed", what=f"not a DCP metadata: {error}", where=where)
        ) from None
    version = parts.get("version")
    return Metadata(
        state_dict_metadata=tensors,
        storage_data=storage,
        planner_data=parts.get("planner_data"),
        version=version if isinstance(version, str) else None,
        checkpoint_id=origin if isinstance(origin, str) else None,
    )


def load_values(
    data: bytes,
    *,
    rebuild: Callable[[TensorRef], Any],
    where: str,
    dtype: Callable[[str], Any] = DTypeName,
    make_size: Callable[[tuple[int, ...]], Any] = tuple,
    trust: bool = False,
) -> Any:
    """The value of a torch.save archive's `data.pkl`; `rebuild` makes tensors of references."""

    def tensor(ref: TensorRef) -> Any:
        _check_ref(ref)
        return rebuild(ref)

    def parameter(args: tuple[Any, ...], charge: Charge) -> Any:
        return args[0]  # a parameter is its tensor here; whether it wants gradients is the model's

    names: dict[tuple[str, str], Any] = {
        key: dtype(value.name) if isinstance(value, DTypeName) else value
        for key, value in _OBJECTS.items()
    }
    as_counts = FUNCTIONS["torch Size"]
    names["torch", "Size"] = Function(
        "Size", lambda args, charge: make_size(as_counts(args, charge))
    )
    names["torch._utils", "_rebuild_tensor_v2"] = Function(
        "_rebuild_tensor_v2", lambda args, charge: tensor(_ref_v2(args))
    )
    names["torch._utils", "_rebuild_tensor_v3"] = Function(
        "_rebuild_tensor_v3", lambda args, charge: tensor(_ref_v3(args, dtype))
    )
    names["torch._utils", "_rebuild_parameter"] = Function("_rebuild_parameter", parameter)
    table = Table(names, BUILDERS, persistent=_storage, trust=trust)
    return interpret(data, table, where=where)


def load_object(data: bytes, *, where: str = "object", trust: bool = False) -> Any:
    """The value of one DCP object entry (the bytes of a torch.save archive).

    Tensors inside are rebuilt on the CPU. Raises `DamagedError` or `RefusedError`.
    """
    if trust:
        return _load_trusted(data, where)
    from torchtitan_ckpt.formats.torch_zip import Archive

    archive = Archive.of_bytes(data, where=where)
    value = archive.load(where=where)
    check_plain(value, where=where)
    return value


def _load_trusted(data: bytes, where: str) -> Any:
    import io

    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise DamagedError(
            Problem(code="pickle.malformed", what=f"{type(error).__name__}: {error}", where=where)
        ) from error


# What torch.save archives say about tensors


def _storage(pid: Any) -> StorageRef:
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise Refused("it refers to something that is no storage")
    _, kind, key, _, numel = pid
    if not isinstance(kind, ByReference) or not kind.name.endswith("Storage"):
        raise Malformed("a storage without a type")
    if type(key) is not str or not key.isascii() or len(key) > 64 or "/" in key or key[:1] == ".":
        raise Malformed("a storage whose name is no number")
    if not is_count(numel):
        raise Malformed("a storage of negative or absurd size")
    return StorageRef(key, _STORAGE_DTYPES[kind.name], numel)


def _ref_v2(args: tuple[Any, ...]) -> TensorRef:
    if not 6 <= len(args) <= 7 or type(args[0]) is not StorageRef or args[0].dtype is None:
        raise Malformed("a tensor without a typed storage")
    storage, offset, size, stride, requires_grad = args[:5]
    if len(args) == 7 and args[6]:
        raise Refused("a tensor with extra state (conjugate or negative view)")
    if args[5]:
        raise Refused("a tensor with backward hooks")
    if not is_count(offset):
        raise Malformed("a tensor at a negative offset")
    return TensorRef(
        storage, storage.dtype, offset, dims(size), dims(stride), requires_grad is True
    )


def _ref_v3(args: tuple[Any, ...], dtype: Callable[[str], Any]) -> TensorRef:
    if not 7 <= len(args) <= 8 or type(args[0]) is not StorageRef:
        raise Malformed("a tensor without a storage")
    name = str(args[6].name if isinstance(args[6], DTypeName) else args[6]).removeprefix("torch.")
    if name not in ITEM_SIZE or (len(args) == 8 and args[7]):
        raise Refused(f"a tensor of dtype {name} or with extra state")
    storage = args[0]
    per_item = ITEM_SIZE[storage.dtype] if storage.dtype else 1
    typed = StorageRef(storage.key, name, storage.numel * per_item // ITEM_SIZE[name])
    return _ref_v2((typed, *args[1:6]))


def _check_ref(ref: TensorRef) -> None:
    if len(ref.size) != len(ref.stride):
        raise Malformed("a tensor with other than one stride a dimension")
    if math.prod(ref.size) == 0:
        return
    last = ref.offset + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True))
    if last >= ref.storage.numel or math.prod(ref.size) >= 2**62:
        raise Malformed("a tensor that reaches beyond its storage")


_STORAGE_DTYPES: dict[str, str | None] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": None,
}


def _plain_names() -> dict[tuple[str, str], Any]:
    names: dict[tuple[str, str], Any] = {("torch", name): DTypeName(name) for name in ITEM_SIZE}
    for path, call in FUNCTIONS.items():
        module, name = path.split()
        names[module, name] = Function(name, call)
        if module == "builtins":
            names["__builtin__", name] = names[module, name]
    for name in ("dict", "list", "int", "float"):
        names["builtins", name] = names["__builtin__", name] = ByReference(name)
    names["numpy", "ndarray"] = ByReference("numpy.ndarray")
    return names


def _loose_size(args: tuple[Any, ...], charge: Charge) -> Any:
    """A shape in `.metadata`, of which there are four a tensor; the manifest checks each once."""
    if len(args) != 1 or type(args[0]) is not tuple:
        raise Malformed("torch.Size of other than one tuple")
    return args[0]


def _metadata_names() -> dict[tuple[str, str], Any]:
    names = _plain_names()
    names["torch", "Size"] = Function("Size", _loose_size)
    dcp = "torch.distributed.checkpoint"
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    ):
        names[f"{dcp}.metadata", name] = RecordClass(name)
    names[f"{dcp}.filesystem", "_StorageInfo"] = RecordClass("_StorageInfo")
    # Where TensorProperties lived before torch 2.3, and lives since.
    for module in (f"{dcp}.metadata", "torch.distributed._shard.sharded_tensor.metadata"):
        names[module, "TensorProperties"] = RecordClass("TensorProperties")
        for enum in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            names[module, enum] = Function(enum, memory_format)
    return names


_METADATA = _metadata_names()
_OBJECTS = _plain_names() | {
    ("torch.storage" if name == "UntypedStorage" else "torch", name): ByReference(name)
    for name in _STORAGE_DTYPES
}
