#!/usr/bin/env bash
# Creates the environment of one role in the working directory. Repeats only when the pins or the role change.
#
#   bash jobgroup/setup.sh services|reward|environment|rollout|trainer|sglang
#
#   services   .venv with the light services (no torch)
#   reward     the same, and bubblewrap, the sandbox of code rewards, where it can be installed
#   environment  the same, and transformers for the tokenizer
#   rollout    .venv with the router; on a machine with an NVIDIA GPU also .venv-sglang, elsewhere, and with
#              RLHF_ROLLOUT__ENGINE=embedded, torch for the embedded engine
#   trainer    .venv with torch and transformers
#   sglang     .venv-sglang alone: SGLang and its kernel build tools (nvcc from wheels, a C++ compiler)
#
# An image may have brought the large packages. Where a Python of the system has the role's main package as it is pinned
# (torch for the trainer, SGLang, math-verify for the services), the environment is made on top of that Python, and only
# what is missing is installed: our package, and whatever has another version than the pins.
set -euo pipefail
cd "$(dirname "$0")/.."
role="${1:-}"
uv="$(command -v uv || true)"
if [ -z "$uv" ] && [ -x "$HOME/.local/bin/uv" ]; then # where SkyPilot puts it
  uv="$HOME/.local/bin/uv"
fi

# make_env FOLDER "PINNED FILES" MAIN-PACKAGE INSTALL-ARGUMENTS…
make_env() {
  local folder="$1" pins="$2" main="$3" base stamp
  shift 3
  # shellcheck disable=SC2086  # a list of files
  stamp="$(cat $pins | cksum) $*"
  if [ "$(cat "$folder/.made-from" 2>/dev/null || true)" = "$stamp" ]; then
    echo "setup: $folder is up to date"
    return
  fi
  base="$(image_python "$main" "${pins##* }")"
  if [ -n "$base" ] && may_make_on_top "$folder"; then
    make_env_on "$base" "$folder" "$@"
  elif [ -n "$uv" ]; then
    echo "setup: making $folder"
    [ -x "$folder/bin/python" ] || "$uv" venv --quiet --python 3.11 "$folder"
    "$uv" pip install --quiet --python "$folder/bin/python" "$@"
  else
    echo "setup: making $folder"
    [ -x "$folder/bin/python" ] || "$(find_python)" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "$@"
  fi
  echo "$stamp" >"$folder/.made-from"
}

# image_python PACKAGE PINS: prints the Python of the system that has pip, and PACKAGE in the version that the file PINS
# names; prints nothing if there is none. A Python of a virtual environment does not count: it may go away.
image_python() {
  local package="$1" version python
  version="$(sed -n "s/^$package==//p" "$2")"
  if [ -z "$version" ]; then
    return
  fi
  for python in $(type -aP python3); do
    if "$python" -c '
import importlib.metadata, sys
import pip
fits = (3, 11) <= sys.version_info[:2] <= (3, 13) and sys.prefix == sys.base_prefix
found = importlib.metadata.version(sys.argv[1]).partition("+")[0]  # without the local part: 2.13.0+cu130
sys.exit(not (fits and found == sys.argv[2]))' "$package" "$version" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

# may_make_on_top FOLDER: false for an environment that is there and stands alone, such as a developer's.
may_make_on_top() {
  [ ! -e "$1/pyvenv.cfg" ] || grep -q '^include-system-site-packages = true' "$1/pyvenv.cfg"
}

# make_env_on PYTHON FOLDER [INSTALL-ARGUMENTS…]
make_env_on() {
  local base="$1" folder="$2" isolation=()
  shift 2
  echo "setup: making $folder on top of the packages of $base"
  # Without pip: Ubuntu's Python cannot make one, and the image's own pip serves.
  "$base" -m venv --without-pip --system-site-packages "$folder"
  if "$base" -c 'import hatchling' 2>/dev/null; then # then our package is built without a network
    isolation=(--no-build-isolation)
  fi
  if [ $# -gt 0 ]; then
    # pip, not uv: uv would install again what the image has.
    "$folder/bin/python" -m pip install --quiet ${isolation[@]+"${isolation[@]}"} "$@"
  fi
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

# make_role EXTRAS MAIN-PACKAGE [INSTALL-ARGUMENTS…]
make_role() {
  local extras="$1" main="$2"
  shift 2
  make_env .venv "pyproject.toml constraints.txt" "$main" "$@" -c constraints.txt -e ".[$extras]"
}

# Without a GPU, PyPI's torch would install 4 GB of unused CUDA. PyTorch's own index has a CPU build.
cpu_torch() {
  if [ -n "$uv" ] && [ -z "${UV_TORCH_BACKEND+set}" ] && ! command -v nvidia-smi >/dev/null &&
    [ -z "$(image_python torch constraints.txt)" ] &&
    curl -sfI --max-time 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    echo "--torch-backend=cpu"
  fi
}

make_sglang() {
  local pins=jobgroup/sglang-requirements.txt
  if [ -n "$(image_python sglang $pins)" ] && has_nvcc; then # SGLang's own image: nothing is missing
    make_env .venv-sglang $pins sglang
  else
    need_uv
    make_env .venv-sglang "jobgroup/sglang-overrides.txt $pins" "" --override jobgroup/sglang-overrides.txt -r $pins
  fi
  link_toolkit .venv-sglang/lib/python3*/site-packages/nvidia/cu13
  if ! command -v "${CXX:-c++}" >/dev/null && ! apt_install g++; then
    echo "setup: there is no C++ compiler, and none can be installed here. SGLang compiles kernels when it starts: install g++." >&2
    return 1
  fi
}

# pip cannot override a version that a package pins.
need_uv() {
  if [ -z "$uv" ]; then
    [ -x .venv-uv/bin/uv ] || { "$(find_python)" -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet uv; }
    uv=.venv-uv/bin/uv
  fi
}

has_nvcc() {
  command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]
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
services) make_role services math-verify ;;
trainer) make_role trainer torch $(cpu_torch) ;;
reward)
  install_bubblewrap
  make_role services math-verify
  ;;
environment)
  install_bubblewrap
  make_role services math-verify transformers
  ;;
rollout)
  if command -v nvidia-smi >/dev/null && [ "${RLHF_ROLLOUT__ENGINE:-sglang}" != embedded ]; then
    make_role rollout ""
    make_sglang
  else
    make_role rollout,trainer torch $(cpu_torch)
  fi
  ;;
sglang) make_sglang ;;
*)
  echo "usage: bash jobgroup/setup.sh services|reward|environment|rollout|trainer|sglang   (got '$role')" >&2
  exit 2
  ;;
esac
