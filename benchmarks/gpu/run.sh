#!/usr/bin/env bash
# The evidence kit, on a machine with a GPU and without network. From anywhere:
#     bash benchmarks/gpu/run.sh [--archives FOLDER] [first | second | PART ...] [--out FOLDER] [--dry]
# Unpacks the archives of pack.py and installs the checkout, if they are not there, then runs kit.py. PYTHON names the
# interpreter, KIT_WORK the folder for what is unpacked, random checkpoints and runs (20 GB, default /tmp/unirl-kit).
set -euo pipefail
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=${KIT_WORK:-/tmp/unirl-kit}
archives=
if [ "${1:-}" = --archives ]; then archives=$2; shift 2; fi
mkdir -p "$work/site"
export PYTHONPATH=$work/site:$kit/..${PYTHONPATH:+:$PYTHONPATH}
for archive in ${archives:+"$archives"/*.txz}; do
  if [ ! -e "$work/$(basename "$archive").done" ]; then
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' "$archive" "$work/site"
    touch "$work/$(basename "$archive").done"
  fi
done
if ! "$python" -c 'import unirl.quickstart' 2>/dev/null; then "$python" "$kit/install_tree.py"; fi
cd "$kit/../.."
exec "$python" "$kit/kit.py" --work "$work" "$@"
