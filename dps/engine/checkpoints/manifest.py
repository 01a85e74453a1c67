"""Manifests: what makes a directory of shard files a checkpoint, as a value and as JSON."""

from __future__ import annotations

import dataclasses
import json

from dps.engine.checkpoints.shard_file import Checksums, FileRecord
from dps.engine.state.ops import TableSpec
from dps.engine.state.recipes import Description
from dps.errors import CheckpointError, DPSError, InputError

__all__ = ["FORMAT", "Checkpoint"]

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it. Made by :class:`Store`.

    Attributes
    ----------
    clock : int or None
        The model's clock: ops of earlier clocks are in the checkpoint, others are not.
    created : str
        The time at which it was begun, ISO 8601, UTC.
    parent : str or None
        The checkpoint that this one is an increment of; None for a full one.
    depth : int
        Its number among the increments that follow a full checkpoint: 0 for the full one.
    files : tuple of FileRecord
        One for each shard of each table.
    metadata : dict
        Plain values that the caller of :meth:`Store.begin` gave.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import Store
    >>> checkpoint = Store("memory://doc-manifest").begin([], clock=40, metadata={"loss": 0.3}).commit([])
    >>> checkpoint.clock, checkpoint.metadata, Checkpoint.from_json(checkpoint.to_json(), "here") == checkpoint
    (40, {'loss': 0.3}, True)
    """

    name: str
    clock: int | None
    created: str
    parent: str | None
    depth: int
    tables: dict[str, TableSpec]
    files: tuple[FileRecord, ...]
    metadata: Description
    version: str

    def file(self, table: str, shard: int) -> FileRecord:
        """The record of one shard's file."""
        for record in self.files:
            if (record.table, record.shard) == (table, shard):
                return record
        known = ", ".join(repr(name) for name in self.tables)
        raise InputError(f"checkpoint {self.name!r} has no shard {shard} of table {table!r}; its tables: {known}")

    def to_json(self) -> bytes:
        """The content of the manifest file."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        content["tables"] = {name: spec.to_dict() for name, spec in self.tables.items()}
        content["files"] = [dataclasses.asdict(record) for record in self.files]
        return json.dumps({"format": FORMAT, "checksum": _checksum(content), "checkpoint": content}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Checkpoint:
        """The checkpoint that a manifest describes; CheckpointError if the bytes are not as :meth:`to_json` wrote."""
        try:
            outer = json.loads(data)
            format_number = outer["format"]
        except (ValueError, KeyError, TypeError) as error:  # ValueError includes bytes that are not UTF-8
            raise CheckpointError(f"{where} is no manifest of dps: damaged, or something else") from error
        if format_number != FORMAT:
            text = f"{where} has format {format_number!r}; this dps reads {FORMAT}. Read it with a newer dps"
            raise CheckpointError(text)
        content = outer.get("checkpoint")
        if not isinstance(content, dict) or outer.get("checksum") != _checksum(content):
            raise CheckpointError(f"{where} does not have the checksum it claims; it is damaged")
        try:
            tables = {name: TableSpec.from_dict(spec) for name, spec in content["tables"].items()}
            files = tuple(FileRecord(**record) for record in content["files"])
            return cls(**{**content, "tables": tables, "files": files})
        except (DPSError, KeyError, TypeError) as error:
            writer = content.get("version")
            raise CheckpointError(f"{where}, written by dps {writer}, cannot be read by this one: {error}") from error


def _checksum(content: object) -> str:
    sums = Checksums()
    sums.update("content", json.dumps(content, sort_keys=True).encode())
    return sums.digests()["content"]
