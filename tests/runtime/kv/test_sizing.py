import msgspec
import pytest
from manifests import whole_rank

from llmbuild.errors import UserError
from llmbuild.runtime.kv.sizing import (
    DEFAULT_GPU_KV_BYTES,
    DEFAULT_KV_BYTES,
    choose_num_blocks,
    kv_bytes,
    parse_bytes,
)
from llmbuild.runtime.manifest import (
    SCHEMA_VERSION,
    File,
    KVLayer,
    KVLayout,
    Limits,
    Manifest,
    Parallel,
)
from llmbuild.runtime.target import CpuTarget, RtxTarget, TensorrtTarget


def manifest(*, max_sequence_length=100, max_sequences=3, block_size=16, head_dim=64, num_ranks=1):
    """num_ranks: all with every head, so that the ranks' blocks are as many times as large."""
    kv = KVLayout(
        block_size=block_size,
        num_kv_heads=2,
        head_dim=head_dim,
        layers=[KVLayer.of_heads([("fp32", "bf16")] * 2)] * 3,
    )
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version="0",
        name="tiny",
        model={},
        vocab_size=300,
        precision="fp32",
        quantised={},
        target=CpuTarget(machine="x86_64", isa_levels=[], compiler="", compiler_flags={}),
        limits=Limits(
            max_sequence_length=max_sequence_length,
            max_step_tokens=64,
            max_sequences=max_sequences,
        ),
        buckets=[1],
        kv=kv,
        parallel=Parallel(tp=num_ranks, pp=1),
        ranks=[whole_rank(kv, 300)] * num_ranks,
        files={"w": File(sha256="", size_bytes=0)},
    )


BLOCK_BYTES = 3 * 2 * 16 * 64 * (4 + 2)  # layers x heads x positions x head_dim x (K + V)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (12345, 12345),
        ("12345", 12345),
        ("512MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7 kb", 7000),
        ("2KiB", 2048),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 G B", "1XB", "nan", True, None, 1.5e9, "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="isn't a size"):
        parse_bytes(text)


def test_default_holds_all_sequences_at_full_length():
    assert choose_num_blocks(manifest(), None, None) == 3 * 7 + 1  # ceil(100 / 16) = 7


def test_default_stays_within_its_cap():
    blocks = choose_num_blocks(manifest(max_sequences=10_000), None, None)
    assert blocks == DEFAULT_KV_BYTES // BLOCK_BYTES


def test_default_holds_one_full_sequence_even_past_the_cap():
    long = manifest(max_sequence_length=1_000_001)
    assert choose_num_blocks(long, None, None) == 62_501 + 1


def test_kv_memory_is_never_exceeded():
    blocks = choose_num_blocks(manifest(), "1MiB", None)
    assert blocks * BLOCK_BYTES <= 2**20 < (blocks + 1) * BLOCK_BYTES


def test_kv_memory_is_that_of_all_ranks_together():
    of_three = choose_num_blocks(manifest(num_ranks=3), "10MiB", None)
    assert 3 * of_three * BLOCK_BYTES <= 10 * 2**20 < 3 * (of_three + 1) * BLOCK_BYTES


def test_giving_both_sizes_is_refused():
    with pytest.raises(UserError, match="give one of them"):
        choose_num_blocks(manifest(), "1MiB", 10)


@pytest.mark.parametrize("num_blocks", [1, 0, -3, 2.0, True, "7"])
def test_too_few_blocks_are_refused(num_blocks):
    with pytest.raises(UserError, match="num_blocks"):
        choose_num_blocks(manifest(), None, num_blocks)


@pytest.mark.parametrize("kv_memory", [0, -1, 2 * BLOCK_BYTES - 1])
def test_too_little_memory_is_refused_with_the_least(kv_memory):
    with pytest.raises(UserError, match=str(2 * BLOCK_BYTES)):
        choose_num_blocks(manifest(), kv_memory, None)


def test_least_memory_is_enough_for_the_least_pool():
    assert choose_num_blocks(manifest(), 2 * BLOCK_BYTES, None) == 2


def gpu_manifest(**sizes):
    """Of an engine whose blocks hold whole sequences."""
    target = RtxTarget(version="1", capabilities=["8.9"])
    return msgspec.structs.replace(manifest(block_size=100, **sizes), target=target)


SEQUENCE_BYTES = gpu_manifest().kv_block_bytes


def test_a_gpus_default_holds_all_sequences_and_has_its_own_cap():
    assert choose_num_blocks(gpu_manifest(), None, None) == 3 + 1
    many = choose_num_blocks(gpu_manifest(max_sequences=100_000), None, None)
    assert many == DEFAULT_GPU_KV_BYTES // SEQUENCE_BYTES + 1
    assert DEFAULT_KV_BYTES < kv_bytes(gpu_manifest(), many) <= DEFAULT_GPU_KV_BYTES


def test_a_gpus_scratch_block_takes_no_memory():
    assert kv_bytes(gpu_manifest(), 2) == SEQUENCE_BYTES
    assert choose_num_blocks(gpu_manifest(), SEQUENCE_BYTES, None) == 2
    assert kv_bytes(manifest(), 5) == 5 * BLOCK_BYTES
    with pytest.raises(UserError, match=f"{SEQUENCE_BYTES}: 1 blocks of"):
        choose_num_blocks(gpu_manifest(), SEQUENCE_BYTES - 1, None)


def test_a_gpus_paged_cache_counts_the_scratch_block_and_has_the_gpus_cap():
    target = TensorrtTarget(version="1", capability="8.9")
    paged = msgspec.structs.replace(manifest(max_sequences=100_000), target=target)
    assert choose_num_blocks(paged, 2 * BLOCK_BYTES, None) == 2
    assert choose_num_blocks(paged, None, None) == DEFAULT_GPU_KV_BYTES // BLOCK_BYTES
