#!/bin/sh
# Serve with dynspec, which is not installed: it is found through PYTHONPATH.
#
#   SGLANG_DYNSPEC_POLICY="batch_size(off_at=32, on_at=24)" ./run.sh --model-path ...
#
# PYTHON is the interpreter that runs SGLang. DYNSPEC_BOOTSTRAP is the folder `bootstrap` of
# sglang_dynspec, if it is not the one of the source checkout that this file lies in.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
bootstrap=${DYNSPEC_BOOTSTRAP:-$here/../../sglang_dynspec/bootstrap}
[ -f "$bootstrap/sitecustomize.py" ] || { echo "$0: no sitecustomize.py in $bootstrap" >&2; exit 2; }

export PYTHONPATH="$bootstrap${PYTHONPATH:+:$PYTHONPATH}"
: "${SGLANG_DYNSPEC_POLICY:=batch_size(off_at=32, on_at=24)}"
export SGLANG_DYNSPEC_POLICY
exec "${PYTHON:-python3}" -m sglang.launch_server "$@"
