#!/usr/bin/env bash
# Creates the environment of one role in the working directory. Repeats only when the pins or the role change.
#
#   bash jobgroup/setup.sh services|reward|environment|rollout|trainer|sglang
#
#   services   .venv with the light services (no torch)
#   reward     the same, and bubblewrap, the sandbox of code rewards, where it can be installed
#   environment  .venv with torch and transformers, and bubblewrap, the sandbox of the tool `python`
#   rollout    .venv with the router; on a machine with an NVIDIA GPU also .venv-sglang, elsewhere, and with
#              RLHF_ROLLOUT__ENGINE=embedded, torch for the embedded engine
#   trainer    .venv with torch and transformers
#   sglang     .venv-sglang alone: SGLang and its kernel build tools (nvcc from wheels, a C++ compiler)
set -euo pipefail
cd "$(dirname "$0")/.."
role="${1:-}"
uv="$(command -v uv || true)"
if [ -z "$uv" ] && [ -x "$HOME/.local/bin/uv" ]; then # where SkyPilot puts it
  uv="$HOME/.local/bin/uv"
fi

# make_env FOLDER "PINNED FILES" INSTALL-ARGUMENTS…
make_env() {
  local folder="$1" pins="$2" stamp
  shift 2
  # shellcheck disable=SC2086  # a list of files
  stamp="$(cat $pins | cksum) $*"
  if [ "$(cat "$folder/.made-from" 2>/dev/null || true)" = "$stamp" ]; then
    echo "setup: $folder is up to date"
    return
  fi
  echo "setup: making $folder"
  if [ -n "$uv" ]; then
    [ -x "$folder/bin/python" ] || "$uv" venv --quiet --python 3.11 "$folder"
    "$uv" pip install --quiet --python "$folder/bin/python" "$@"
  else
    [ -x "$folder/bin/python" ] || "$(find_python)" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "$@"
  fi
  echo "$stamp" >"$folder/.made-from"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: Python 3.11 to 3.13 is missing. Install python3.11 with venv, or uv (https://docs.astral.sh/uv), which brings its own." >&2
  return 1
}

# make_role EXTRAS [OPTION-OF-UV…]
make_role() {
  local extras="$1"
  shift
  make_env .venv "pyproject.toml constraints.txt" "$@" -c constraints.txt -e ".[$extras]"
}

# Without a GPU, PyPI's torch would install 4 GB of unused CUDA. PyTorch's own index has a CPU build.
cpu_torch() {
  if [ -n "$uv" ] && [ -z "${UV_TORCH_BACKEND+set}" ] && ! command -v nvidia-smi >/dev/null &&
    curl -sfI --max-time 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    echo "--torch-backend=cpu"
  fi
}

make_sglang() {
  make_env .venv-sglang jobgroup/sglang-requirements.txt -r jobgroup/sglang-requirements.txt
  link_toolkit .venv-sglang/lib/python3*/site-packages/nvidia/cu13
  if ! command -v "${CXX:-c++}" >/dev/null && ! apt_install g++; then
    echo "setup: there is no C++ compiler, and none can be installed here. SGLang compiles kernels when it starts: install g++." >&2
    return 1
  fi
}

# link_toolkit CUDA_HOME: makes NVIDIA's wheels look like a CUDA toolkit. They have lib/libcudart.so.13, but SGLang
# links its kernels with -L$CUDA_HOME/lib64 -lcudart -L$CUDA_HOME/lib64/stubs -lcuda.
link_toolkit() {
  local home="$1" library driver
  if [ ! -d "$home/lib" ]; then
    return
  fi
  ln -sfn lib "$home/lib64"
  for library in "$home"/lib/lib*.so.*; do
    ln -sf "$(basename "$library")" "${library%%.so.*}.so"
  done
  driver="$(ldconfig -p 2>/dev/null | sed -n 's/.*libcuda\.so\.1 .*=> //p' | head -n 1)"
  if [ -n "$driver" ]; then
    mkdir -p "$home/lib/stubs"
    ln -sf "$driver" "$home/lib/stubs/libcuda.so"
  fi
}

# apt_install PACKAGE…: fails if it cannot install.
apt_install() {
  local root=()
  if [ "$(id -u)" != 0 ]; then
    root=(sudo -n)
  fi
  command -v apt-get >/dev/null &&
    { "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq "$@"; } >/dev/null 2>&1
}

# If a run rewards code and the sandbox is missing, the reward-server reports it with the remedy.
install_bubblewrap() {
  if command -v bwrap >/dev/null || ! command -v apt-get >/dev/null; then
    return
  fi
  if ! apt_install bubblewrap libseccomp2; then
    echo "setup: bubblewrap cannot be installed here: code rewards will be refused" >&2
  fi
}

case "$role" in
services) make_role services ;;
trainer) make_role trainer $(cpu_torch) ;;
reward)
  install_bubblewrap
  make_role services
  ;;
environment)
  install_bubblewrap
  make_role services,trainer $(cpu_torch)
  ;;
rollout)
  if command -v nvidia-smi >/dev/null && [ "${RLHF_ROLLOUT__ENGINE:-sglang}" != embedded ]; then
    make_role rollout
    make_sglang
  else
    make_role rollout,trainer $(cpu_torch)
  fi
  ;;
sglang) make_sglang ;;
*)
  echo "usage: bash jobgroup/setup.sh services|reward|environment|rollout|trainer|sglang   (got '$role')" >&2
  exit 2
  ;;
esac
