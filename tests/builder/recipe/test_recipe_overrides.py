"""`--set` overrides: in order, strictly, and like the same keys in the file."""

from pathlib import Path

import pytest
import yaml
from recipe_texts import HASH, MINIMAL, changed, problems, resolve, write

from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.errors import RecipeError


def test_number_with_an_exponent_needs_no_dot(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "verify: {tolerance: 1e-3}\n"
    assert resolve(tmp_path, text).verify.tolerance == 0.001


def test_overrides_are_applied_in_order(tmp_path: Path) -> None:
    resolved = resolve(
        tmp_path,
        MINIMAL,
        "precision=bf16",
        "limits.max_sequences=4",
        "limits.max_sequences=7",
        "buckets=[1, 7]",
        f"model.sha256={{model.safetensors: {HASH}}}",
        "verify.tolerance=5e-3",
    )
    assert resolved.precision == "bf16"
    assert resolved.limits.max_sequences == 7
    assert resolved.buckets == (1, 7)
    assert resolved.model.sha256 == {"model.safetensors": HASH}
    assert resolved.verify.tolerance == 0.005


def test_an_override_that_takes_back_what_an_earlier_one_gave_is_refused(tmp_path: Path) -> None:
    given = ("quantisation.rotation=true", "quantisation=w8a16")
    with pytest.raises(RecipeError, match=r"^--set quantisation=w8a16: it replaces all of quant"):
        resolve(tmp_path, MINIMAL, *given)
    found = resolve(tmp_path, MINIMAL, *reversed(given)).quantisation
    assert (found.scheme, found.rotation) == ("w8a16", True)


def test_override_below_a_target_of_one_word_keeps_the_word(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"target": "cpu"}), "target.isa=x86-64-v3")
    assert (resolved.target.kind, resolved.target.isa) == ("cpu", ("x86-64-v3",))


def test_override_below_a_scheme_of_one_word_keeps_the_word(tmp_path: Path) -> None:
    content = changed({"quantisation": "w4a8"})
    found = resolve(tmp_path, content, "quantisation.group_size=32").quantisation
    assert (found.scheme, found.group_size, found.symmetric) == ("w4a8", 32, True)
    found = resolve(tmp_path, content, "quantisation=w8a16").quantisation
    assert (found.scheme, found.group_size) == ("w8a16", "row")


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("limits.max_seqs=3", "limits.max_seqs", "nearest known key is limits.max_sequences"),
        ("precison=bf16", "precison", "nearest known key is precision"),
        ("limits.max_sequences=many", "limits.max_sequences", "given many; allowed: an integer"),
        ("limits.max_sequences.most=3", "limits.max_sequences", "given {most: 3}"),
        ("precision=", "precision", "given null; allowed: fp32 or bf16"),
    ],
)
def test_bad_override_is_refused_like_the_same_key_in_the_file(
    override: str, key: str, words: str, tmp_path: Path
) -> None:
    (line,) = problems(tmp_path, MINIMAL, override)
    assert line.startswith(f"{key}: ")
    assert words in line


def test_problem_of_an_override_names_the_override(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--set precison=bf16:"):
        load_recipe(write(tmp_path, MINIMAL), ["precison=bf16"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("precision", "KEY.PATH=VALUE"),
        ("=bf16", "KEY.PATH=VALUE"),
        ("limits..x=1", "KEY.PATH=VALUE"),
        ("buckets=[1", "line 1, column 3: bad YAML"),
    ],
)
def test_malformed_override_is_refused(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert str(refused.value).startswith(f"--set {override}")
    assert words in str(refused.value)
