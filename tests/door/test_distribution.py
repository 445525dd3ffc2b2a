"""What the project is called where: the distribution is specdec-runtime, the import and the command are specdec."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import specdec

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SEARCHED = ("specdec", "draft", "verify", "attention", "tests", "scripts", "examples", "docs", "benchmarks", ".ci")
TEXT = {".py", ".md", ".sh", ".toml", ".txt", ""}
# `specdec` as something that pip fetches: with an extra, or after `pip install`; a path, a flag or specdec-runtime is neither.
FETCHED = re.compile(r"""specdec\[\w|pip3? install[^\n#;&|"]*?["' ]specdec(?![-\w./])""")


def texts() -> list[Path]:
    files = [path for folder in SEARCHED for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXT]
    return [*files, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]


def advice_to_fetch_another_project(text: str) -> list[str]:
    return [match.group() for match in FETCHED.finditer(text)]


def test_nobody_is_told_to_install_another_project():
    """Keeps out: advice that replaces this project by the one that is called `specdec` on PyPI."""
    files = [path for path in texts() if path != Path(__file__).resolve()]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): advice_to_fetch_another_project(path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_such_advice_is_seen():
    """Keeps out: a search that overlooks extras, quotes or an option in between, or that forbids what is right."""
    for wrong in ("pip install specdec", "pip install 'specdec[plots]'", "needs specdec[plots]", 'pip install -U "specdec"'):
        assert advice_to_fetch_another_project(wrong), wrong
    for right in ("pip install -e '.[plots]'", "pip install specdec-runtime", "pip install matplotlib", "-e /src/specdec"):
        assert not advice_to_fetch_another_project(right), right


def test_the_distribution_has_a_name_of_its_own():
    """Keeps out: a wheel that pip would replace by another project's, and a version that is said twice and differs."""
    assert PROJECT["name"] == "specdec-runtime"
    assert set(PROJECT["scripts"]) == {"specdec"}
    assert PROJECT["version"] == specdec.__version__


def test_versions_need_no_installed_metadata():
    """Keeps out: minutes of measuring that end in a KeyError, because a source tree has no distribution's metadata."""
    from importlib.metadata import PackageNotFoundError

    from specdec.loading.about import machine

    def nothing_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    found = machine.versions(nothing_installed)
    assert found["specdec"] == specdec.__version__ and found["torch"]
    assert "specdec" not in machine.PACKAGES


def test_doctor_knows_the_packages_of_every_extra() -> None:
    """Keeps out: a report that is silent about what a server, a grammar or a plot lacks."""
    from specdec.loading.about import machine

    extras = PROJECT["optional-dependencies"]
    wanted = {re.split(r"[^\w-]", line)[0] for name, lines in extras.items() if name not in ("test", "dev") for line in lines}
    assert wanted and wanted <= {*machine.PACKAGES}
