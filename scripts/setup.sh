#!/usr/bin/env bash
# Makes .venv and installs specdec there, editable, with the versions of constraints.txt.  It ends at once if nothing changed.
#
#   scripts/setup.sh [extras]      extras of pyproject.toml, comma-separated: test, dev, plots, serve, grammar, ray
#   PYTHON=/path/to/python         the interpreter to use; otherwise the first suitable one on the PATH
#
# This script never forces a CPU-only torch.  On PyPI the pinned torch is the CUDA build for Linux x86-64; a machine gets a
# CPU-only one only if its pip is configured with another source that offers one.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
extras="${1:-}"
log="$venv/setup.log"
cd -- "$root"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

check_python='
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d; 3.11 or newer is needed" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("lacks venv or ensurepip (Debian, Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
'

find_python() { # sets $python, or ends with what is wrong with each candidate
    local candidates=(python3 python3.13 python3.12 python3.11) reasons="" reason
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for python in "${candidates[@]}"; do
        command -v -- "$python" >/dev/null || continue
        if reason="$("$python" -c "$check_python" 2>&1 </dev/null)"; then return; fi
        reason="${reason:-does not run}"
        reasons+=$'\n'"  $python: ${reason%%$'\n'*}"
    done
    die "no Python >= 3.11 with venv found (tried ${candidates[*]}); install one or set PYTHON=/path/to/python$reasons"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt "$@" >>"$log" 2>&1 </dev/null && return
    tail -n 30 "$log" >&2
    die "pip could not install it; the whole log is in $log"
}

# pip warns of an extra that does not exist, and installs the rest.
known="$(sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z0-9-]*\) = \[.*/\1/p' pyproject.toml | paste -sd, | sed 's/,/, /g')"
for extra in ${extras//,/ }; do
    case ", $known, " in *", $extra, "*) ;; *) die "there is no extra '$extra'; the extras are $known" ;; esac
done

# A stamp file holds a checksum of what an install depends on.  An install with extras also counts as one without.
wanted="$({ printf '%s\n' "$root"; cat pyproject.toml constraints.txt; } | cksum)"
stamp="$venv/.specdec-$extras"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then exit 0; fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # .venv does not exist, is half made, or lost its interpreter
    find_python
    say "making .venv with $python ($("$python" -V 2>&1))"
    "$python" -m venv --clear "$venv" || die "$python could not make a virtual environment in $venv"
fi

say "installing specdec${extras:+[$extras]} and its pinned dependencies (minutes at first; log in .venv/setup.log)"
: >"$log"
pip_install pip setuptools
# PyPI's `specdec`, or an install of this project from before its distribution was renamed, owns the same files.
"$venv/bin/python" -m pip uninstall --yes specdec >>"$log" 2>&1 </dev/null || true
pip_install --no-build-isolation -e ".${extras:+[$extras]}"

torch="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
if has_gpu; then gpu="found"; else gpu="not found"; fi
case "$gpu $torch" in
    "found "*+cpu) say "WARNING: this machine has an NVIDIA GPU, but pip's configuration led to a CPU-only torch $torch" ;;
    *) say "ready: torch $torch, NVIDIA GPU $gpu" ;;
esac
printf '%s\n' "$wanted" | tee "$venv/.specdec-" >"$stamp"
