"""The recipes in examples/serve/: specdec knows their flags, their parts fit together, and they hold no secret.

Neither a container nor a service is started here: that needs a container engine and a system manager.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit.serving.server import Served

from specdec import SpecDecoder, shipped
from specdec.cli.entry import build_parser
from specdec.serve.options import KEY_VARIABLE
from specdec.serve.times import TIMES

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "examples" / "serve" / "Containerfile"
UNIT = ROOT / "examples" / "serve" / "specdec.service"
AFTER_GRACE = round(2 * TIMES.last)  # seconds that a server may take after its grace period


def instructions() -> list[tuple[str, str]]:
    """(instruction, what follows it) of the container recipe, without comments."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def value_of(name: str) -> str:
    """What the last instruction of that name says."""
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def run_command() -> list[str]:
    """The command that the recipe's head gives for running the container."""
    head = CONTAINER.read_text().partition("\nARG")[0].replace("\n#", "\n").replace("\\\n", " ")
    (line,) = [line.strip() for line in head.splitlines() if line.strip().startswith("podman run")]
    return shlex.split(line)


def settings() -> Iterator[tuple[str, str]]:
    """(name, value) of every setting of the unit."""
    text = re.sub(r"^#.*\n", "", UNIT.read_text(), flags=re.M).replace("\\\n", " ")
    for line in text.splitlines():
        if "=" in line and not line.startswith("["):
            name, _, value = line.partition("=")
            yield name, value.strip()


def grace_of(argv: list[str]) -> int:
    """The grace period of a command line of `specdec serve`, whose flags must all be known."""
    seconds = build_parser().parse_args(argv).grace_seconds
    assert isinstance(seconds, int)
    return seconds


def test_the_container_starts_the_server() -> None:
    """Keeps out: a flag that was renamed, a shell that keeps SIGTERM from the server, and a kill within the grace period."""
    argv, command = json.loads(value_of("ENTRYPOINT")), run_command()
    assert argv[:4] == ["/usr/bin/tini", "--", "/opt/specdec/bin/specdec", "serve"] and value_of("STOPSIGNAL") == "SIGTERM"
    image = command.index("specdec-serve")
    grace = grace_of([*argv[3:], *command[image + 1 :]])
    assert int(command[command.index("--stop-timeout") + 1]) > grace + AFTER_GRACE
    assert f"-p 127.0.0.1:{value_of('EXPOSE')}:{value_of('EXPOSE')}" in " ".join(command)
    mounts = {part.split(":")[1] for part in command if part.endswith(":ro")}
    assert mounts == {command[command.index(flag) + 1] for flag in ("--target", "--draft")}


def test_the_container_runs_without_rights_and_holds_no_secret() -> None:
    """Keeps out: a server that runs as root, and a key, a model or a whole clone in a layer."""
    names = [name for name, _ in instructions()]
    last_root = max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    assert names.index("USER") > last_root and value_of("USER").isdigit() and int(value_of("USER")) > 0
    baked = " ".join(rest for name, rest in instructions() if name in ("ENV", "ARG", "RUN"))
    assert not re.search(r"key|token|secret|password", baked, re.I)
    command = run_command()
    assert "--env-file" in command and KEY_VARIABLE in CONTAINER.read_text() and "--api-key" not in command


def test_the_container_has_all_that_the_package_is_made_of() -> None:
    """Keeps out: a package or a file of the build that was added to the project and not to the recipe."""
    copies = [rest.split() for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    copied = {source.rstrip("/") for *sources, _ in copies for source in sources}
    assert all((ROOT / source).exists() for source in copied) and "." not in copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    places = project["tool"]["setuptools"]["package-dir"]
    packages = {places.get(name, name.replace(".", "/")).split("/")[0] for name in project["tool"]["setuptools"]["packages"]}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    assert copied == packages | files
    assert "serve" in project["project"]["optional-dependencies"] and "'.[serve]'" in CONTAINER.read_text()


def test_the_containers_health_check_tells_a_server_from_none() -> None:
    """Keeps out: a check that always passes, or that a healthy server fails."""
    _, flag, program = json.loads(value_of("HEALTHCHECK").partition("CMD")[2])
    port = f":{value_of('EXPOSE')}/"
    assert flag == "-c" and program.count(port) == 1

    def check() -> int:
        patient = program.replace(port, f":{server.port}/").replace("timeout=4", "timeout=60")  # the machine may be busy
        return subprocess.run([sys.executable, "-c", patient], capture_output=True, timeout=120).returncode

    with SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu", max_batch_size=1) as decoder:
        with Served(decoder, api_key="sesame") as server:
            assert check() == 0
        assert check() != 0


def test_the_unit_starts_and_stops_the_server() -> None:
    """Keeps out: a flag that was renamed, a kill before the grace period ends, and a key that every user can read."""
    unit = dict(settings())
    argv = shlex.split(unit["ExecStart"])
    assert argv[:2] == ["/opt/specdec/bin/specdec", "serve"]
    assert int(unit["TimeoutStopSec"]) > grace_of(argv[1:]) + AFTER_GRACE
    assert unit["KillSignal"] == "SIGTERM" and unit["Restart"] == "on-failure" and unit["SuccessExitStatus"] == "143"
    assert unit["EnvironmentFile"] == "/etc/specdec/key.env" and KEY_VARIABLE in UNIT.read_text()
    assert "--api-key" not in argv and KEY_VARIABLE not in str(unit)
    cache = unit["Environment"].partition("TRITON_CACHE_DIR=")[2]
    assert unit["ProtectSystem"] == "strict" and cache.startswith(f"/var/cache/{unit['CacheDirectory']}/")


def test_the_unit_is_hardened() -> None:
    """Keeps out: a server that runs as root, or that may do what a server need not."""
    unit = dict(settings())
    assert unit["User"] == "specdec" and unit["CapabilityBoundingSet"] == "" and unit["DevicePolicy"] == "closed"
    wanted = (
        "NoNewPrivileges PrivateTmp ProtectHome ProtectKernelModules ProtectKernelTunables RestrictNamespaces LockPersonality"
    )
    assert {name: unit.get(name) for name in wanted.split()} == dict.fromkeys(wanted.split(), "yes")
    assert unit.get("MemoryDenyWriteExecute", "no") == "no"  # CUDA makes code while it runs


def verified(unit: str, folder: Path) -> str:
    """What `systemd-analyze verify` says against a unit; it looks for the command, so that one that exists takes its place."""
    path = folder / "specdec.service"
    path.write_text(unit.replace("/opt/specdec/bin/specdec", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("changed", ["", "ProtectClock=yes"])
def test_every_setting_of_the_unit_exists(tmp_path: Path, changed: str) -> None:
    """Keeps out: a setting that is spelt wrongly, which systemd ignores with a warning that nobody reads."""
    names = [name for name, _ in settings()]
    assert len(names) == len(set(names)) > 30 and all(re.fullmatch(r"[A-Z][A-Za-z]+", name) for name in names)
    if shutil.which("systemd-analyze"):  # systemd itself knows which settings there are
        said = verified(UNIT.read_text().replace(changed, "ProtectClok=yes") if changed else UNIT.read_text(), tmp_path)
        assert ("Unknown key" in said) == bool(changed) and bool(said) == bool(changed), said
