"""The matrices with a row for each token, the embedding and the head: what a step reads of them."""

from llmbuild.runtime.manifest import KV_ITEM_BITS, Manifest

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
_TILE_ROWS = 16  # a packed matrix is of whole tiles


def has_own_head(manifest: Manifest) -> bool:
    """Whether the head is another matrix than the embedding, of which a step then gathers rows."""
    return manifest.model.get("tie_embeddings") is False or HEAD in manifest.quantised


def embedding_bytes(manifest: Manifest) -> int:
    return _bytes(manifest, EMBEDDING)


def head_bytes(manifest: Manifest) -> int:
    return _bytes(manifest, HEAD if has_own_head(manifest) else EMBEDDING)


def _bytes(manifest: Manifest, name: str) -> int:
    """Of a packed matrix with a row for each token."""
    rows = -(-manifest.vocab_size // _TILE_ROWS) * _TILE_ROWS
    columns = manifest.model["hidden_size"]
    assert isinstance(columns, int)
    grid = manifest.quantised.get(name)
    if grid is None:
        return rows * columns * KV_ITEM_BITS[manifest.precision] // 8
    groups = columns // (grid.group_size or columns)
    return rows * (columns * grid.bits // 8 + groups * (2 if grid.symmetric else 4))
