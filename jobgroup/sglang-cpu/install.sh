#!/usr/bin/env bash
# Real SGLang for a CPU, in an environment of its own (its pins clash with the project's). About 2.3 GB, most of it torch.
#
#   bash jobgroup/sglang-cpu/install.sh [FOLDER]       FOLDER: .venv-sglang
#
# Done again only when something in this folder has changed. PYTHON names the Python 3.11 to use.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${1:-.venv-sglang}"
python="${PYTHON:-python3.11}"
mark=sglang-cpu # tells this environment from the one for GPUs, which may have the same name

stop() {
  echo "sglang-cpu: $1" >&2
  exit 2
}

[ "$(uname -sm)" = "Linux x86_64" ] || stop "SGLang's wheel is for Linux on x86-64, this is $(uname -sm). Use rollout.engine=embedded."
stamp="$mark $(cat "$here/requirements.txt" "$here"/plugin/*.py "$here"/plugin/*.toml "$here/install.sh" | cksum)"
made="$(cat "$folder/.made-from" 2>/dev/null || true)"
if [ "$made" = "$stamp" ]; then
  echo "sglang-cpu: $folder is up to date"
  exit
fi
case "$made" in
"$mark "* | "") ;;
*) stop "$folder holds another environment (SGLang for GPUs?). Remove it, or name another folder and set rollout.engine_python." ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || stop "'$python' is no Python 3.11. Set PYTHON=/path/to/python3.11."

echo "sglang-cpu: making $folder, a few minutes"
rm -f "$folder/.made-from"
"$python" -m venv --clear "$folder"
pip() {
  "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check
}
# torch first and with what it asks for: a CUDA build brings libraries along, a CPU build does not.
pip install -c "$here/requirements.txt" torch torchvision setuptools
# The rest exactly as listed: SGLang declares every GPU library as a requirement.
pip install --no-deps -r "$here/requirements.txt"
# Built from a copy, so that nothing is left in the source tree.
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
cp "$here"/plugin/*.py "$here"/plugin/*.toml "$build"
pip install --no-deps --no-build-isolation "$build"
"$folder/bin/python" - <<'CHECK'
import sglang
from sglang.srt.platforms import current_platform

name = type(current_platform).__name__
assert name == "TorchCpu", f"SGLang uses {name} instead of this project's platform"
print(f"sglang-cpu: SGLang {sglang.__version__} is installed")
CHECK
echo "$stamp" >"$folder/.made-from"
