"""Reads a raw config dict key by key, so that a key nobody understands can't pass unseen."""

from typing import Any, NoReturn

from llmbuild.errors import ModelError

# Keys of config.json that can't change a decoder's logits. What a family doesn't take and this
# list doesn't name is refused, so a key belongs here only when every value of it is harmless.
CARRIES_NOTHING = frozenset(
    {
        *("model_type", "architectures"),  # family_of has judged these two
        # where the file came from, and the type that the weights happen to be stored in
        *("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"),
        *("_attn_implementation_autoset", "transformers.js_config", "tokenizer_class"),
        *("unsloth_fixed", "unsloth_version"),
        "auto_map",  # code beside the file, which is never run: the architecture is judged by name
        # training, and how transformers runs the model
        *("initializer_range", "attention_dropout", "neftune_noise_alpha", "use_cache"),
        *("output_attentions", "output_hidden_states", "return_dict", "torchscript"),
        *("chunk_size_feed_forward", "use_bfloat16"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout"),
        *("residual_dropout", "embedding_dropout", "embed_dropout", "classifier_dropout"),
        *("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        "pretraining_tp",  # split the matrix products of old transformers, whatever the value
        # classification heads, which a causal LM lacks
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
        *("_num_labels", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj"),
        # token ids and generation defaults: generation_config.json and the tokenizer rule them
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "prefix"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("output_scores", "return_dict_in_generate", "remove_invalid_values"),
    }
)


MAX_NUMBER = 3.4028234663852886e38  # the largest of fp32, in which the model computes
MAX_INTEGER = (1 << 31) - 1  # kernels index with int32
# What is built for each of these is at hand in memory, so a wild number must not get that far.
_MAX_COUNTS = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts"), 1 << 14)


class ConfigReader:
    """One pass over a raw dict: take each key with its type and range, then `finish`.

    Every method raises ModelError, naming the key, what was given and what is allowed.
    path: where the dict stands inside the config, for messages ("rope_scaling.").
    """

    def __init__(self, raw: dict[str, Any], family: str, path: str = "") -> None:
        self.family = family
        self._raw = raw
        self._path = path
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._raw

    def require(self, *keys: str) -> None:
        """Refuse a config that leaves these out: where a default would have to be guessed."""
        missing = [self._path + key for key in keys if key not in self]
        if missing:
            self.fail(f"lacks {', '.join(missing)}; add the original model's value")

    def integer(self, key: str, minimum: int = 1) -> int:
        """A required int of at least `minimum`, and of no more than any model has."""
        self.require(key)
        value = self._take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.refuse(key, value, f"an integer of at least {minimum}")
        maximum = _MAX_COUNTS.get(key, MAX_INTEGER)
        if value > maximum:
            self.refuse(key, value, f"an integer of at most {maximum}")
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """An int of at least `minimum`; None when the key is absent or null."""
        return None if self._take(key) is None else self.integer(key, minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default` when the key is absent, required without one."""
        if default is not None and key not in self:
            return default
        self.require(key)
        return self._positive(key, self._take(key))

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0; None when the key is absent or null."""
        return None if self._take(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A required list of finite numbers above 0."""
        self.require(key)
        value = self._take(key)
        if not isinstance(value, list):
            self.refuse(key, value, "a list of numbers above 0")
        return tuple(self._positive(f"{key}[{i}]", item) for i, item in enumerate(value))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of ints from 0 on; empty when the key is absent or null."""
        value = self._take(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            self.refuse(key, value, "a list of integers of at least 0")
        return tuple(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._take(key) if key in self else default
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, allowed: tuple[str, ...]) -> str | None:
        """One of the allowed strings; None when the key is absent."""
        if key not in self:
            return None
        value = self._take(key)
        if value not in allowed:
            self.refuse(key, value, " or ".join(map(repr, allowed)))
        return str(value)

    def texts(self, key: str, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of allowed strings; None when the key is absent or null."""
        value = self._take(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(item not in allowed for item in value):
            self.refuse(key, value, f"a list of {' or '.join(map(repr, allowed))}")
        return tuple(value)

    def ignore(self, *keys: str) -> None:
        """Take keys of which no value changes what this family computes."""
        self._taken.update(keys)

    def only(self, key: str, allowed: bool | float | str) -> None:
        """Accept a key that may be absent, or present with this one value."""
        value = self._take(key) if key in self else allowed
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            self.refuse(key, value, f"{allowed!r}, or leave it out")

    def section(self, key: str) -> "ConfigReader | None":
        """A nested dict as its own reader, to be finished by the caller; None when it is absent,
        null or empty."""
        value = self._take(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        return ConfigReader(value, self.family, f"{self._path}{key}.")

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuse every key that was neither taken nor is known to carry nothing."""
        unknown = sorted(set(self._raw) - self._taken - harmless)
        if unknown:
            names = ", ".join(f"{self._path}{key} ({self._raw[key]!r})" for key in unknown)
            self.fail(
                f"has keys that the {self.family} family doesn't understand: {names}. They may "
                "change what the model computes; remove those that you know don't"
            )

    def refuse(self, key: str, given: object, allowed: str) -> NoReturn:
        """Raise ModelError for a key's value."""
        self.fail(f"{self._path}{key} is {given!r}; allowed is {allowed}")

    def fail(self, text: str) -> NoReturn:
        raise ModelError(f"{self.family} config: {text}.")

    def _take(self, key: str) -> Any:
        self._taken.add(key)
        return self._raw.get(key)

    def _positive(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(key, value, "a number above 0")
        if not 0 < value <= MAX_NUMBER:  # which NaN fails too
            self.refuse(key, value, f"a finite number above 0, at most {MAX_NUMBER:g}")
        return float(value)
