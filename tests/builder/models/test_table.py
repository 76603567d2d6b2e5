"""`llmbuild models` tells the truth, and docs/models.md shows the same table."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmbuild.builder.models.families import FAMILIES
from llmbuild.builder.models.models_cli import models_command
from llmbuild.builder.models.table import FEATURES, features, markdown, rows

BEGIN, END = "<!-- families -->\n", "<!-- /families -->"
# What transformers' modeling code of three families has beyond Llama's, or can be configured to.
KNOWN = {
    "gemma2": {
        *("activation", "attention_scale", "attention_soft_cap", "embed_scale", "logit_soft_cap"),
        *("norm", "o_bias", "post_norm", "qkv_bias", "windows"),
    },
    "gpt2": {
        *("gated_mlp", "layer_ropes", "learned_positions", "mlp_bias", "norm", "o_bias"),
        "qkv_bias",
    },
    "mixtral": {"moe", "windows"},
}


def test_every_family_is_listed_once_with_what_it_covers() -> None:
    listed = rows()
    assert [row[0] for row in listed] == sorted(family.name for family in FAMILIES)
    for name, covers, named, formats, targets in listed:
        assert targets in ("cpu", "cpu, tensorrt", "cpu, tensorrt, tensorrt-rtx")
        assert covers, name
        assert named, name
        assert formats in ("safetensors", "safetensors, GGUF")


def test_families_that_a_gpus_target_can_not_express_are_not_for_it() -> None:
    """The others are lowered in tests/builder/targets/tensorrt."""
    targets = {name: targets for name, _, _, _, targets in rows()}
    for name in ("mixtral", "olmoe", "qwen3_moe"):
        assert targets[name] == "cpu"
    assert targets["gemma2"] == "cpu, tensorrt"
    for name in ("llama", "gemma", "gpt2", "qwen3"):
        assert targets[name] == "cpu, tensorrt, tensorrt-rtx"


@pytest.mark.parametrize("name", KNOWN)
def test_features_are_those_that_the_family_is_known_for(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    assert set(features(family)) == KNOWN[name]
    (row,) = (row for row in rows() if row[0] == name)
    assert set(row[2].split(", ")) == {FEATURES[feature] for feature in KNOWN[name]}


def test_every_feature_that_is_named_belongs_to_some_family() -> None:
    assert set(FEATURES) == {feature for family in FAMILIES for feature in features(family)}


def test_the_command_lists_every_family_with_its_features() -> None:
    done = CliRunner().invoke(models_command)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    for name, *facts in rows():
        begin = lines.index(name)
        titles = ("models", "features", "formats", "targets")
        for line, title, fact in zip(lines[begin + 1 : begin + 5], titles, facts, strict=True):
            assert line.split(maxsplit=1) == [title, fact]


def test_the_documentation_holds_exactly_the_table_that_the_command_prints(checkout: Path) -> None:
    printed = CliRunner().invoke(models_command, ["--markdown"]).output
    assert printed == markdown()
    text = (checkout / "docs" / "models.md").read_text()
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    table = text.partition(BEGIN)[2].partition(END)[0]
    assert table == printed
