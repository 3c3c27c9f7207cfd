#!/bin/sh
# Fetch what a machine without a network lacks for `gpu_session.py`, into .gpu/ (ignored by git): copy it there with the clone.
# It has Linux on x86-64, Python 3.12, torch, torchvision, scikit-learn, matplotlib, pandas, typer, rich and safetensors.
#
#   sh benchmarks/gpu_carry.sh
#
# The images are Fashion-MNIST, of the Debian package dataset-fashion-mnist; without them, the stages take scikit-learn's digits.
set -eu
cd "$(dirname "$0")/.."

rm -rf .gpu/site
"${PYTHON:-python3}" -m pip install --quiet --no-deps --no-compile --only-binary=:all: --target .gpu/site \
  --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0 \
  randomgen==2.5.0 dp-accounting==0.6.0 dm-tree==0.1.10 platformdirs==4.14.5 opacus==1.6.0 \
  pytest pluggy iniconfig packaging

images=/usr/share/datasets/fashion-mnist
if [ ! -d .gpu/fashion-mnist ]; then
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  if [ ! -d "$images" ]; then
    (cd "$work" && apt-get download --quiet dataset-fashion-mnist && dpkg -x dataset-fashion-mnist*.deb .)
    images="$work$images"
  fi
  cp -r "$images" .gpu/fashion-mnist
fi
du -sh .gpu/site .gpu/fashion-mnist
