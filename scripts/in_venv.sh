#!/usr/bin/env bash
# Sets up .venv, then becomes one of its commands, in the caller's own current folder.  The other scripts here call this one.
#
#   scripts/in_venv.sh EXTRAS COMMAND [ARGUMENT...]      EXTRAS as in setup.sh, "" for none; COMMAND is a file in .venv/bin
set -euo pipefail
root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" "$1"
export SPECDEC_BEGAN="${EPOCHREALTIME:-}" # to the system, the command is as old as this script, which may have installed for minutes
exec "$root/.venv/bin/$2" "${@:3}"
