import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmbuild.runtime.detokenizer import Detokenizer
from llmbuild.runtime.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # for hf_encoders

WriteGguf = Callable[..., Path]

LLAMA_METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
}

TEXTS = (
    *("a", " ", "  ", "   a", "a   ", "Hello world", " Hello  world ", "\n", "\n\n", "a\n\n\nb"),
    *("\t\tif x:\n\t\t\treturn", "    def f(x):\n        return x[0:12] + 3.14159\n", "a \n b"),
    *("for (int i = 0; i < 100; ++i) { s += a[i]; }", "x/y//z\n/\n", "https://example.org/a?b=c&d"),
    *("don't DON'T we'll I'VE it's 'quoted'", "HelloWorld camelCase XMLHttpRequest ABCdefGHI"),
    *(
        "1",
        "12",
        "123",
        "1234",
        "1234567890",
        "3.14",
        "1,000,000.50",
        "²½Ⅻ 12½",
        "٣٤٥ \uff14\uff15",
    ),
    *("你好,世界", "今日はいい天気ですね。", "안녕하세요 세계", "混合 text 和 English", "。。。!!"),
    *("مرحبا بالعالم", "السَّلَامُ عَلَيْكُمْ", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก"),
    *(
        "Привет, мир! ЁЖИК",
        "Ελληνικά ΑΘΗΝΑ",
        "naïve café résumé",
        "cafe\u0301 e\u0301\u0323",
        "ﬁ ŉ İ",
    ),
    *("👍", "👩‍👩‍👧‍👦 family", "🏳️‍🌈🇩🇪", "smile 😀😀😀!", "a\u200bb\u00a0c\u3000d"),
    *('(a) [b] {c} <d> "e"', "a--b---c====d", "!!!???...", "$100 + 50% = ^_^ ~|`", "#hash @at"),
    *("\r\n windows\r\nlines\r", "tab\there", "trailing \n", "qzqz", " qzqz qzqz", "\x00\x7f"),
)


# Texts that tokenizers get wrong: what meets at the seams of pieces, and what no piece covers.
PIECES = (
    *(" ", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u200b"),
    *("the", "The", "HELLO", "it's", "we'LL", "x", "0", "42", "1234567", "3.14", "½", "٣٤"),
    *("你好", "世界。", "こんにちは", "안녕", "مرحبا", "שלום", "नमस्ते", "สวัสดี", "Привет", "ﬁ"),
    *("👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "e\u0301", "\u0301", "\u200d", "\ufeff", "\x00", "\x1b[0m"),
    *("def f(x):", "\treturn x;", "</div>", "{}", "!=", "...", "--", "_", "\\n", '"', "\u2581"),
    *("<s>", "</s>", "<unk>", "<|im_end|>", "<tool_call>", "<0x41>", "<|im_end"),
)
LONG_TEXTS = (
    *(
        "",
        "a" * 700,
        "ab" * 300,
        "你" * 300,
        "👍" * 100,
        " " * 200,
        "\n" * 100,
        "1" * 301,
        "!" * 99,
    ),
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 9,
    "https://example.org/" + "path/" * 40 + "?q=" + "%20" * 40,
    "for i in range(10):\n    if i % 2:\n        print(i)\n\n\n# done\n" * 4,
    *("\u0627\u0644\u0639\u0631\u0628\u064a\u0629 " * 20, "日本語のテキスト、" * 20),
    "".join(map(chr, range(32))) + "".join(map(chr, range(127, 160))),
)


def _hard_texts() -> tuple[str, ...]:
    """200 texts: TEXTS, LONG_TEXTS, and random rows of PIECES."""
    rng = np.random.default_rng(5)
    texts = [*TEXTS, *LONG_TEXTS]
    while len(texts) < 200:
        texts.append("".join(rng.choice(PIECES, rng.integers(2, 12))))
    return tuple(texts)


@pytest.fixture(scope="session")
def hard_texts() -> tuple[str, ...]:
    return _hard_texts()


@pytest.fixture(scope="session")
def check_tokenizer() -> Callable[..., None]:
    """check_tokenizer(reference, folder, texts): the tokenizer files in `folder` give the ids and
    the texts of transformers' `reference`, and a stream gives the same text bit by bit."""

    def check(reference: Any, folder: Path, texts: Iterable[str]) -> None:
        ours = load_tokenizer(folder)
        for text in texts:
            ids = reference(text, add_special_tokens=False).input_ids
            assert ours.encode(text, with_bos=False) == ids, text
            decoded = reference.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids) == decoded, text
            detokenizer = Detokenizer(ours)
            streamed = [*map(detokenizer.push, ids), detokenizer.finish()]
            assert "".join(streamed) == decoded, text

    return check


@pytest.fixture
def texts() -> tuple[str, ...]:
    return TEXTS


@pytest.fixture
def llama_metadata() -> dict[str, Any]:
    return dict(LLAMA_METADATA)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes a small GGUF file with the gguf library; a tensor is an array, or (type, array)."""

    def write(
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Any] | None = None,
        architecture: str = "llama",
        name: str = "model.gguf",
    ) -> Path:
        if tensors is None:
            tensors = {"token_embd.weight": np.zeros((10, 32), np.float32)}
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor_name, tensor in tensors.items():
            kind, data = tensor if isinstance(tensor, tuple) else (None, tensor)
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


@pytest.fixture
def quantised() -> Callable[[Type, int, int], np.ndarray]:
    """Random packed rows of a quantised type, [rows, bytes]: any bit pattern is a valid block
    once its half-precision scales are finite."""

    def make(kind: Type, rows: int, columns: int) -> np.ndarray:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(kind.value)
        blocks = generator.integers(
            0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8
        )
        halves = {Type.Q6_K: [208]}.get(kind, [0, 2])
        if kind in (Type.Q4_0, Type.Q5_0, Type.Q8_0):
            halves = [0]
        for start in halves:
            scales = generator.normal(0, 0.1, len(blocks)).astype(np.float16)
            blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(rows, -1)

    return make
