"""Installs and conversions of peers: nothing half-made is used, and what fails says why."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.peers import convert, install
from bench.peers.variants import OURS, PEERS, VARIANTS, Peer
from bench.peers.work_folder import Unavailable, WorkFolder
from bench.peers.workload import make_cases, max_sequence
from llmbuild.builder.recipe.recipe import load_recipe

PEER = Peer("openvino", "continuous", ("a==1", "b==2"), 10, removed=("c",))


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Noted instead of run; the first makes the environment's folder."""
    noted: list[list[str]] = []

    def note(self: WorkFolder, name: str, command: Sequence[object], env: object = None) -> None:
        noted.append(list(map(str, command)))
        if "venv" in noted[-1]:
            Path(noted[-1][-1]).mkdir(parents=True)

    monkeypatch.setattr(WorkFolder, "run", note)
    monkeypatch.setattr(install, "FREE_GB", 0)
    return noted


def test_install_takes_pinned_packages_and_removes_what_does_not_fit(
    work: WorkFolder, commands: list[list[str]]
) -> None:
    install.install(PEER, work)
    assert commands[1][-3:] == ["install", "a==1", "b==2"]
    assert commands[2][-3:] == ["uninstall", "-y", "c"]
    assert install.is_installed(PEER, work)


def test_second_install_does_nothing(work: WorkFolder, commands: list[list[str]]) -> None:
    install.install(PEER, work)
    commands.clear()
    install.install(PEER, work)
    assert commands == []


def test_interrupted_install_is_done_anew(work: WorkFolder, commands: list[list[str]]) -> None:
    left = work.venv(PEER.name) / "left"
    left.parent.mkdir(parents=True)
    left.touch()
    assert not install.is_installed(PEER, work)
    install.install(PEER, work)
    assert not left.exists()


def test_other_versions_are_installed_anew(work: WorkFolder, commands: list[list[str]]) -> None:
    install.install(PEER, work)
    newer = Peer(PEER.name, PEER.batching, ("a==1", "b==3"), 10)
    assert not install.is_installed(newer, work)


def test_full_disk_stops_an_install(
    work: WorkFolder, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "FREE_GB", 1 << 30)
    with pytest.raises(Unavailable, match="an install needs"):
        install.install(PEER, work)
    assert commands == []


def test_what_is_missing_counts_the_peers_that_convert(work: WorkFolder) -> None:
    names = [peer.name for peer in install.missing(["vllm", "llama_cpp"], work)]
    assert names == ["transformers", "vllm", "llama_cpp"]


def test_every_peer_pins_its_packages_and_has_a_driver() -> None:
    for peer in PEERS.values():
        assert all("==" in requirement for requirement in peer.requirements)
        assert Path(install.__file__).with_name("drivers").joinpath(f"{peer.name}.py").exists()


def test_failing_command_is_told_with_its_last_line(work: WorkFolder) -> None:
    code = "import sys; print('no wheel for this machine'); sys.exit(1)"
    with pytest.raises(Unavailable, match=r"^no wheel for this machine \(see .*x\.log\)"):
        work.run("x", [sys.executable, "-c", code])


def test_half_made_model_is_never_taken_for_a_whole_one(work: WorkFolder) -> None:
    work.models.mkdir()
    code = "import sys; open(sys.argv[1], 'w').write('half'); sys.exit(int(sys.argv[2]))"

    def make(exit_code: str) -> Path:
        return convert._made(
            "model", work, lambda out: [sys.executable, "-c", code, out, exit_code]
        )

    with pytest.raises(Unavailable):
        make("1")
    assert not (work.models / "model").exists()
    assert make("0") == work.models / "model"
    assert make("1").exists()  # made already, so nothing is run


def test_weights_are_the_largest_file_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(bytes(100))
    (tmp_path / "model" / "tokenizer.json").write_bytes(bytes(30))
    assert convert.weights_bytes(tmp_path / "model") == 100
    assert convert.weights_bytes(tmp_path / "model" / "weights.bin") == 100


def test_every_variant_of_ours_has_a_recipe_that_reserves_the_longest_request() -> None:
    names = {variant.model for variant in VARIANTS if variant.peer == OURS}
    assert names == {path.stem for path in convert.RECIPES.glob("*.yaml")}
    for name in names:
        recipe = load_recipe(convert.RECIPES / f"{name}.yaml", ())
        assert recipe.name == name
        assert recipe.limits.max_sequence_length >= max_sequence(make_cases())
