"""An install holds what the checkout holds: every package, module, kernel header, template."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import llmbuild

SUFFIXES = (".py", ".h", ".cpp.in", ".html.in", ".typed")


@pytest.fixture(scope="module")
def setuptools_table(checkout: Path) -> dict[str, Any]:
    with (checkout / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]


@pytest.fixture(scope="module")
def installed_paths(checkout: Path, setuptools_table: dict[str, Any]) -> dict[str, Path]:
    """Every source file below the mapped folders, by its path inside a wheel."""
    return {
        "/".join([*package.split("."), *path.relative_to(checkout / folder).parts]): path
        for package, folder in setuptools_table["package-dir"].items()
        for path in sorted((checkout / folder).rglob("*"))
        if path.name.endswith(SUFFIXES)
    }


def packages_of(paths: list[str]) -> set[str]:
    return {path.rpartition("/")[0].replace("/", ".") for path in paths}


def test_package_list_is_complete_and_exact(
    setuptools_table: dict[str, Any], installed_paths: dict[str, Path]
) -> None:
    listed = setuptools_table["packages"]
    assert listed == sorted(set(listed))
    assert packages_of(list(installed_paths)) == set(listed)


def test_every_folder_with_sources_is_a_package(installed_paths: dict[str, Path]) -> None:
    marked = [path for path in installed_paths if path.endswith("/__init__.py")]
    assert packages_of(list(installed_paths)) == packages_of(marked)


def test_checkout_has_no_unmapped_package(checkout: Path, setuptools_table: dict[str, Any]) -> None:
    on_disk = {path.parent.name for path in checkout.glob("*/__init__.py")}
    assert on_disk <= set(setuptools_table["package-dir"].values())


def test_wheel_holds_every_module_kernel_header_and_template(
    checkout: Path,
    setuptools_table: dict[str, Any],
    installed_paths: dict[str, Path],
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source)
    for folder in setuptools_table["package-dir"].values():
        if (checkout / folder).is_dir():
            shutil.copytree(checkout / folder, source / folder)

    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip_wheel, "--no-build-isolation", "--wheel-dir", tmp_path, source],
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"llmbuild-{llmbuild.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == set(installed_paths)
