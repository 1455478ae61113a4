"""Tensors to files and back, by torch.distributed.checkpoint (DCP), over any transport.

Of DCP we use its planners, its file writer and reader, and its layout on disk, so that its own
tools (`dcp_to_torch_save`, `dcp.load`) open our checkpoints. We do not use `dcp.save` and
`dcp.load`: they talk over a process group, and our ranks may be threads, or have a group that is
not the default one. The steps are theirs, with transport.all_gather_object in place of their
collectives:

    local plans ──all-gather──► global plan, the same on all ──► data files ──all-gather──► index

Nor do we open DCP's index: `.metadata` is a pickle, and reading it would run code of the file. We
write it for others, and read ours from the manifest. The data files are read with
`weights_only=True`.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _ReaderView

from gems.distributed.agree import on_all_ranks
from gems.errors import CheckpointError, short
from gems.torch.checkpoint.atomic_folder import sync
from gems.torch.checkpoint.manifest import DTYPES, REMEDY, Manifest, TensorEntry
from gems.torch.tensors.released import form_of
from gems.transport.encoding import sendable
from gems.transport.protocol import Transport

Tensor = torch.Tensor
sendable(SavePlan, WriteItem, WriteItemType, TensorWriteData, ChunkStorageMetadata)
sendable(TensorProperties, MetadataIndex, WriteResult, _StorageInfo, _StoragePrefix)


def write(
    folder: Path,
    mine: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    transport: Transport,
    doing: str,
    present: Mapping[str, Callable[[], Tensor]],
) -> dict[str, TensorEntry]:
    """Every rank writes its own tensors, by keys like `model.stem.weight`; where all of them are.

    `aliases` are further keys of tensors that some rank writes. No two ranks may have one key.
    Offloaded tensors are loaded by `present`, one at a time, when they are written.
    """
    rank = transport.rank
    planner, writer = _Planner(present), FileSystemWriter(folder, overwrite=False)

    def planned() -> Any:
        planner.set_up_planner(_nested(mine), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def written() -> Any:
        plan = planner.finish_plan(plans[rank])
        return writer.write_data(plan, planner).wait() if plan.items else []

    plans, metadata = planner.create_global_plan(on_all_ranks(transport, doing, planned))
    plans = writer.prepare_global_plan(plans)
    written_by = on_all_ranks(transport, doing, written)

    found = {result.index.fqn: result for results in written_by for result in results}
    same = [_renamed(metadata, alias, found[key]) for alias, key in aliases.items()]

    def indexed() -> None:
        if rank == 0:
            writer.finish(metadata, [*written_by, same])
            sync(folder)

    on_all_ranks(transport, doing, indexed)
    found |= {result.index.fqn: result for result in same}
    forms = metadata.state_dict_metadata
    return {key: _entry(forms[key], result.storage_data) for key, result in found.items()}


class _Planner(DefaultSavePlanner):
    """Loads offloaded tensors one at a time, when they are written."""

    def __init__(self, present: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self.present = present

    def lookup_object(self, index: MetadataIndex) -> Any:
        get = self.present.get(index.fqn)
        return super().lookup_object(index) if get is None else get()


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By section: `model.stem.weight` becomes `stem.weight` of `model`, also for DCP's tools."""
    sections: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = form_of(tensor).detach()
    return sections


def _renamed(metadata: Metadata, alias: str, written: WriteResult) -> WriteResult:
    """A tied weight is written once, and found by each of its names."""
    form = metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[written.index.fqn]
    metadata.planner_data[alias] = tuple(alias.split(".", 1))
    assert isinstance(form, TensorStorageMetadata)
    index = MetadataIndex(alias, form.chunks[0].offsets, 0)
    return dataclasses.replace(written, index=index)


def _entry(form: Any, info: _StorageInfo) -> TensorEntry:
    dtype = str(form.properties.dtype).removeprefix("torch.")
    return TensorEntry(tuple(form.size), dtype, info.relative_path, info.offset, info.length)


def read(folder: Path, manifest: Manifest, keys: Iterable[str]) -> dict[str, Tensor]:
    """These tensors, in host memory: tied weights once. Nothing else of the files is read."""
    wanted = {key: _entry_of(key, manifest) for key in keys}
    first = {entry: key for key, entry in wanted.items()}
    state: dict[str, Any] = {
        key: torch.empty(entry.shape, dtype=dtype_of(entry)) for entry, key in first.items()
    }
    metadata = _metadata({key: entry for entry, key in first.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader = _Reader(folder)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return {key: state[first[entry]] for key, entry in wanted.items()}


class _Reader(FileSystemReader):
    """Reads only tensors that are stored as they are. torch.load would also decompress them, to a
    thousand times the bytes that the manifest allows."""

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        try:
            with zipfile.ZipFile(_View(file, sinfo.offset, sinfo.length)) as members:
                sizes = [(x.compress_type, x.file_size) for x in members.infolist()]
        except zipfile.BadZipFile:
            sizes = []
        kinds, size = {kind for kind, _ in sizes}, sum(size for _, size in sizes)
        if kinds != {zipfile.ZIP_STORED} or size > sinfo.length:
            raise CheckpointError(
                f"the tensor at byte {sinfo.offset} of {sinfo.relative_path} is not stored as "
                f"torch stores it, uncompressed; {REMEDY}"
            )
        return super()._slice_file(file, sinfo)


class _View(_ReaderView):
    """A part of a file. torch's own counts from the end in the wrong direction."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        super().seek(offset, whence)
        return self.tell()


def dtype_of(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{short(entry.dtype, 60)} is not a type of tensors in this torch")
    return DTYPES[entry.dtype]


def _entry_of(key: str, manifest: Manifest) -> TensorEntry:
    if key not in manifest.tensors:
        raise CheckpointError(f"the manifest lists no tensor {key}, which state.json refers to")
    return manifest.tensors[key]


def _metadata(entries: Mapping[str, TensorEntry]) -> Metadata:
    """DCP's index, out of ours."""
    forms: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, entry in entries.items():
        start, shape = torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
        properties = TensorProperties(dtype=dtype_of(entry))
        chunk = ChunkStorageMetadata(start, shape)
        forms[key] = TensorStorageMetadata(properties, shape, [chunk])
        storage[MetadataIndex(key, start, 0)] = _StorageInfo(entry.file, entry.offset, entry.bytes)
    return Metadata(forms, storage_data=storage)
