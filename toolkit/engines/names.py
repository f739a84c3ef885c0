"""Names that engines and readers of checkpoints have in common, without torch."""

from __future__ import annotations

from typing import Final

SHARDS: Final = "sharded"
"""Folder of FSDP2's shards in a native checkpoint."""

LIST: Final = ".metadata"
"""File in which `torch.distributed.checkpoint` lists its shards."""

STAGE: Final = "stage"
"""Begin of the names of files with a pipeline's weights: one of each rank that has others."""

TENSOR_RANKS: Final = "ranks that share a matrix"
"""Key in their metadata, beside names of weights with the dimension in which each is cut."""

METADATA_TYPES: Final = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
"""Types that this list names, of torch/distributed/checkpoint/metadata.py (torch 2.11 to 2.15)."""

GETATTR: Final = ("builtins", "getattr")
"""What Python 3.11.2 pickles the member of an enum as a call of; 3.11.7 calls the enum."""

MASTER: Final = "master"
"""Key of a parameter's master in the optimizer's state."""


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch's wrappers in the model add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
